# A loop on DistributedDataParallel: the model is sharded in place, and all ranks give their parts
# of the states that rank 0 saves.
s/^from torch\.nn\.parallel import DistributedDataParallel as DDP$/import fullshard as fs/
s/^\( *\)\([A-Za-z_.]*\) = DDP(.*$/\1fs.shard(\2)/
s/\b\([A-Za-z_.]*model\)\.module\b/\1/
s/^\( *\)model\.require_backward_grad_sync = .*/\1pass/
s/^\( *\)if rank == 0:$/\1weights = fs.full_state_dict(model)\n\1states = fs.full_optimizer_state_dict(model, optimizer)\n&/
s/raw_model\.state_dict()/weights/
s/\b\(self\.\)\?optimizer\.state_dict()/states/
