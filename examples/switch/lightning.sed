# Lightning with ModelParallelStrategy: our fully_shard, and a strategy that loads its modules.
s/^from torch\.distributed\.[a-z_.]*fsdp[a-z_.]* import .*\bfully_shard\b.*/&\nfrom fullshard.compat.fsdp2 import fully_shard/
s/^from lightning\.pytorch\.strategies import ModelParallelStrategy$/from fullshard.integrations.lightning import ModelParallelStrategy/
