# Accelerate: the name Accelerator is ours, after the import of the library.
s/^from accelerate import .*\bAccelerator\b.*/&\nfrom fullshard.integrations.accelerator import ShardedAccelerator as Accelerator/
