# torchtitan's file that calls fully_shard (0.2: models/llama3/infra/parallelize.py, 0.3: distributed/fsdp.py): our name hides torch's.
0,/^from torchtitan/s/^from torchtitan/from fullshard.compat.fsdp2 import fully_shard\n&/
