"""The configuration of `fullshard train` without arguments, and the cost of importing one."""

from fullshard.config.files import OriginKind
from fullshard.config.load import load_config
from fullshard.config.values import Strategy


def test_the_main_job_is_what_the_readme_promises():
    resolved = load_config(None)
    resolved.check_supported()
    config = resolved.config
    assert config.strategy is Strategy.FULL_SHARD
    assert config.launch.world_size is None  # one rank per GPU, or two
    assert config.data.path is None  # text that ships with every Python
    assert config.model.config["model_type"] == "llama"
    assert config.model.config["vocab_size"] == 512
    assert config.training.max_seq_length == 128
    assert config.training.max_steps > 0
    origin = resolved.origins["training.max_steps"]
    assert (origin.kind, origin.file) == (OriginKind.FILE, "main_job.yaml")
