"""The first check of a run: that its paths exist. It imports no torch, so it is fast."""

from __future__ import annotations

from pathlib import Path

from fullshard.config.load import Resolved
from fullshard.data.records import files_at, under
from fullshard.errors import ConfigError, DataError
from fullshard.models.config import check_model_folder


def check_paths(resolved: Resolved, *, data: bool = True, coming: Path | None = None) -> None:
    """Raises if a path of the configuration does not exist.

    Args:
        resolved: Configuration with origins, which name the line of the file in errors.
        data: Whether the data must exist too.
        coming: Folder of a model that will be made later.

    Raises:
        ConfigError: A model's or tokenizer's folder is missing.
        DataError: The data is missing.
    """
    config, folders = resolved.config, [(resolved.config.model.name_or_path, "model")]
    if config.teacher is not None:
        folders.append((config.teacher.name_or_path, "teacher"))
    tokenizer = config.data.tokenizer
    try:
        for named, what in folders:
            if named is not None and Path(named) != coming:
                check_model_folder(Path(named), f"{what}.name_or_path")
        if tokenizer is not None and not Path(tokenizer).is_dir():
            raise ConfigError(
                f"data.tokenizer: expected a local folder with a tokenizer, got '{tokenizer}'. "
                "Name the folder that holds tokenizer.json."
            )
        sources = {f"data.mixture.{n}": one.path for n, one in enumerate(config.data.mixture)}
        for key, path in {"data": config.data.path, **sources}.items() if data else ():
            if path is not None:
                with under(key):
                    files_at(Path(path))
    except (ConfigError, DataError) as error:
        raise resolved.located(error) from error
