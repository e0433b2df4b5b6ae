# transformers' Trainer and its subclasses in TRL: the class of `trainer = SomeTrainer(...)` shards.
s/^\( *\)trainer = \([A-Za-z0-9]*Trainer\)(/\1from fullshard.integrations.transformers import sharded\n\n\1trainer = sharded(\2)(/
