"""A run's checkpoints: how an existing run in its folder is treated, and when to save.

--resume        an unfinished run there    a finished one, more steps asked    a finished one
auto            resumed                    continued                           moved to .1, .2
never           moved                      moved                               moved
PATH            moved; the new run begins with the model, optimizer and position of PATH

A run that ended early (early_stopping_patience) counts as finished, whatever steps are asked for.

[Note: data position]
state.json holds {global_batch, samples_seen, epoch, seed, data}. The samples of a step depend
only on the global batch, the seed and the step (see data/order.py), so "step" is the whole
position: no sample is repeated or skipped, whatever number of ranks resumes. `data` is the
checksum of the tokens (`DatasetFacts.fingerprint`): a run does not resume from a checkpoint that
was trained on others.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from os.path import lexists
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from fullshard import saving
from fullshard.checkpoint.commit import ALONE, failure
from fullshard.checkpoint.format import CONFIG, STATE, natural
from fullshard.checkpoint.read import choose, read_tables
from fullshard.checkpoint.retain import (
    IN_RUN,
    Found,
    checkpoints_in,
    newest_complete,
    path_to_resume,
)
from fullshard.checkpoint.storage import StorePath, read_file, storage_path
from fullshard.config.environment import read_launch_environment
from fullshard.config.files import File, flatten, is_below, parse_text
from fullshard.config.load import Resolved, load_config
from fullshard.config.schema import DistillConfig, RunConfig, SftConfig
from fullshard.data.arrays import sample_of
from fullshard.data.dataset import tokenizer_texts
from fullshard.errors import CheckpointError, ConfigError, PreemptedError, untrusted
from fullshard.launch.run_lock import is_holder
from fullshard.models.config import sample_of_model
from fullshard.observe import watchdog
from fullshard.run.folder import HOLDS, LAST_SAVED, RunFolder, RunStatus
from fullshard.run.loop import Keeper, Patience, Trainee
from fullshard.run.optim import StepPlan
from fullshard.saving import SaveSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TEACHER = "teacher"  # key of run.json: the sample of its weights
# Keys of a checkpoint's state.
POSITION, SCALER, PATIENCE = "position", "scaler", "patience"
# Keys of a model's configuration that change no step. The row of pad_token_id is not trained.
_FREE_KEYS = re.compile(
    r"(^|\.)_|architectures|dtype|transformers_version|use_cache|(?<!pad)_token_id$"
)
_ANEW = "Use --resume never, or another output_dir."
# Sections and keys that must not change when a run resumes.
SAME = ("data", "model", "teacher", "freeze", "lora", "training.max_seq_length", "training.seed")


@dataclass(frozen=True)
class Resume:
    """The checkpoint from which a run resumes.

    Attributes:
        path: A checkpoint, or a folder of checkpoints; None: the run begins at step 0.
        global_batch: Samples per step, kept from the earlier run; None: the configured number.
        in_place: The run in the folder itself continues, in place of a new run.
        required: The user named `path`, perhaps of another run: a missing checkpoint is an error.
    """

    path: Path | None = None
    global_batch: int | None = None
    in_place: bool = False
    required: bool = False

    def as_json(self) -> dict[str, Any]:
        """For run.json, from which the ranks read it."""
        return _JSON.dump_python(self, mode="json")

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Resume:
        """Reads what `as_json` wrote."""
        return _JSON.validate_python(record.get("resume") or {})

    def sentence(self, output_dir: Path) -> str:
        """A sentence about the new run and an existing one."""
        if self.path is not None:
            found = choose(ALONE, self.path, whole=False)
            what = "the run there resumes" if self.in_place else "a new run starts"
            return f"{what} with the model and optimizer of step {found.step} in {found.path}"
        is_there = RunFolder(output_dir).record.is_file() and not self.in_place
        return f"begins at step 0{'; the existing run is moved aside' if is_there else ''}"

    def check_steps(self, done: int, path: Path, num_steps: int) -> None:
        """Raises ConfigError if a run of `num_steps` has nothing left after a checkpoint."""
        if done > num_steps or (done == num_steps and self.required):
            raise ConfigError(
                f"training.max_steps: expected more than the {done} steps of {path}; got "
                f"{num_steps}. Raise it, or start from an earlier checkpoint."
            )

    def moved(self, old: Path, new: Path | None) -> Resume:
        """The same after the folder of the checkpoint was moved."""
        if new is None or self.path is None or not self.path.is_relative_to(old.resolve()):
            return self
        return replace(self, path=new.resolve() / self.path.relative_to(old.resolve()))


_JSON = TypeAdapter(Resume)


def find_resume(
    asked: str, output_dir: Path, key: str = "--resume", checkpoint_dir: str | None = None
) -> Resume:
    """The meaning of `--resume` for a folder, before the number of steps is known.

    Args:
        asked: auto, never or a path.
        output_dir: Folder of the run.
        key: Where the user wrote it, for errors.
        checkpoint_dir: Other place of the run's checkpoints. A run whose folder was lost resumes
            from there.

    Raises:
        CheckpointError: PATH has no checkpoint.
        ConfigError: PATH looks like a misspelt word.
    """
    if asked == "never":
        return Resume()
    path = path_to_resume(asked, key)
    if path is not None:
        try:
            return _from_path(path)
        except CheckpointError as error:
            raise CheckpointError(f"{key}: {str(error).removeprefix('checkpoint: ')}") from error
    folder = RunFolder(output_dir)
    if folder.record.is_file():
        return own_resume(folder)
    root = checkpoint_dir and storage_path(checkpoint_dir)
    return _from_path(root) if root and holds_checkpoints(root) else Resume()


def holds_checkpoints(folder: Path) -> bool:
    """Whether a folder has checkpoints, complete or not; interrupted saves do not count.

    Raises:
        CheckpointError: A file is in its place, or a link that leads to nothing.
    """
    if lexists(folder) and not folder.is_dir():
        raise CheckpointError(
            f"checkpoint: expected the folder of the run's checkpoints at '{folder}', got a file "
            "or a broken link. Restore the checkpoints, or remove it to start again."
        )
    return any(not found.is_leftover for found in checkpoints_in(folder))


def check_checkpoint_dir(checkpoint_dir: str | None, resume: Resume, output_dir: Path) -> None:
    """Raises ConfigError if a run would save in its own folder, or where another one has saved."""
    root = storage_path(checkpoint_dir).resolve() if checkpoint_dir else None
    if root and root == output_dir.resolve():  # each of the two locks its folder
        raise ConfigError(
            "training.checkpoint_dir: expected another folder than training.output_dir, got "
            f"'{root}' for both. Remove it to save in '{root / IN_RUN}'."
        )
    if root and root != (resume.path and resume.path.resolve()) and holds_checkpoints(root):
        raise ConfigError(
            "training.checkpoint_dir: expected a folder without checkpoints for a run that does "
            f"not resume from it; '{root}' has some. Use an empty or new folder, or resume from "
            f"the checkpoints: --resume {root}."
        )


def own_resume(folder: RunFolder) -> Resume:
    """The checkpoint from which a run in its own folder resumes.

    Until it has a checkpoint of its own, it resumes from the one that it began with.
    """
    record = folder.read_record()
    with _readable(folder):
        first = Resume.of_record(record)
        batch = record.get("planned", {}).get("samples_per_step") or first.global_batch
        batch = batch and natural(batch)
    if holds_checkpoints(folder.checkpoints):
        return Resume(folder.checkpoints, batch, in_place=True)
    before = first.path and storage_path(first.path)  # elsewhere if checkpoint_dir has changed
    if first.required or (before and holds_checkpoints(before)):
        return replace(first, path=before, in_place=True)
    return Resume(None, batch, in_place=True)


def continues(resume: Resume, output_dir: Path, num_steps: int) -> bool:
    """Whether the run in the folder continues, now that the number of steps is known.

    Raises:
        CheckpointError: See `check_saved`.
    """
    if not resume.in_place:
        return False
    folder = RunFolder(output_dir)
    record = folder.read_record()
    with _readable(folder):
        measured = record.get("measured", {})
        more = num_steps > measured.get("num_steps", 0) and not measured.get("stopped_early")
    if record.get("status") == RunStatus.FINISHED and not more:
        return False
    check_saved(resume, folder)
    return resume.path is not None or record.get("status") != RunStatus.FINISHED


def check_saved(resume: Resume, folder: RunFolder) -> None:
    """Raises CheckpointError if a run saved checkpoints, and none of its own is there."""
    step = folder.read_record().get(LAST_SAVED)
    if step is None:
        return
    lost = resume.path is None or resume.required
    if resume.path is not None and not lost and resume.path != folder.checkpoints:
        lost = (newest_complete(resume.path).step or 0) < step  # where the run began
    if lost:
        raise CheckpointError(
            f"checkpoint: expected the run's own checkpoints, of steps up to {step}, in "
            f"'{folder.checkpoints}'; there are none. Restore them (is a disk not mounted?), or "
            "use --resume never to start again."
        )


def _readable(folder: RunFolder) -> AbstractContextManager[None]:
    """A context for reading values of a record that another program may have written."""
    return untrusted(folder.record, "the record of a run", ConfigError, _ANEW)


def check_settings(resolved: Resolved, output_dir: Path, resume: Resume) -> None:
    """See `check_same`, for a run that resumes in its folder, and `say_changed`."""
    if resume.path is not None and resume.in_place:
        check_same(resolved, output_dir, resume.path)
    elif resume.path is not None:
        say_changed(resolved.config, choose(ALONE, resume.path, whole=False))


def check_same(resolved: Resolved, output_dir: Path, checkpoints: Path) -> None:
    """Checks that a resumed run has a complete checkpoint, and its old settings of data and model.

    Other settings may change; the log names them.

    Raises:
        CheckpointError: There are checkpoints, but none is complete; the run does not start over.
        ConfigError: Data or model changed; names the key.
    """
    saved, folder = newest_complete(checkpoints), RunFolder(output_dir)
    source: Path | File | None = folder.config if folder.config.is_file() else None
    if source is None and checkpoints == folder.checkpoints:
        source = _config_of(saved)
    if source is None:
        return  # the run was killed before it was prepared
    before, now = (_values(config) for config in (load_config([source]).config, resolved.config))
    check_teacher(resolved.config, folder)
    for key in _changed(before, now):
        if is_below(key, SAME):
            raise ConfigError(
                f"{key}: expected the value of the run that resumes in '{output_dir}' "
                f"({before.get(key)}); got {now.get(key)}. Use --resume never, or "
                "another output_dir."
            )
    with suppress(CheckpointError, ConfigError):  # damaged, or of a version with other keys
        if (copy := _config_of(saved)) is not None:  # of another run, if it was copied from there
            before = _values(load_config([copy]).config)
    told = [f"{key} {before.get(key)} -> {now.get(key)}" for key in _changed(before, now)]
    if told:
        logger.info("changed since the checkpoint was saved: %s", ", ".join(told))


def say_changed(config: RunConfig, found: Found) -> None:
    """Names settings of model and data in which a new run differs from that of its checkpoint."""
    if (saved_with := _config_of(found)) is None:
        return
    before, now = flatten(saved_with.values), flatten(config.to_dict())
    shared = before.keys() & now.keys()  # another version has other keys, except in model.config
    told = [
        f"{key} {before.get(key)} -> {now.get(key)}"
        for key in _changed(before, now)
        if is_below(key, SAME if key in shared else ("model.config",))
    ]
    if told:
        logger.info("the new run differs from that of the checkpoint: %s", ", ".join(told))


def _config_of(found: Found) -> File | None:
    """The configuration with which a command saved a checkpoint; None if a script saved it."""
    copy = found.files / RunFolder(found.path).config.name
    if found.manifest is None or copy.name not in found.manifest.files:
        return None
    with untrusted(copy, "the configuration of the run that saved the weights"):
        return parse_text(read_file(copy).decode(), str(copy))


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [key for key in {**before, **now} if before.get(key) != now.get(key)]


def _values(config: RunConfig) -> dict[str, Any]:
    """The values of all keys; recipes read a missing section as its defaults."""
    sections = {"sft": config.sft or SftConfig(), "distill": config.distill or DistillConfig()}
    return flatten(config.model_copy(update=sections).to_dict())


def check_teacher(config: RunConfig, folder: RunFolder) -> None:
    """Raise ConfigError if the teacher differs from the sample of it in run.json.

    Ranks call it after they opened the teacher or the cache.
    """
    known = folder.read_record().get(TEACHER)
    if known is not None and known != sample_of_teacher(config):
        raise ConfigError(
            "teacher: expected the weights and the config.json (or the distill.cache) from which "
            f"the run in '{folder.path}' has learned so far; they were replaced. Restore them, use "
            "--resume never, or use another output_dir."
        )


def sample_of_teacher(config: RunConfig) -> str | None:
    """Checksum of a sample of the teacher's weights and its config.json, or of its cache.json.

    None without a teacher. A run that has a teacher and a cache learns from the cache.
    """
    cache = config.distill and config.distill.cache
    return sample_of(Path(cache).glob("cache.json")) if cache else sample_of_model(config.teacher)


def check_data(resume: Resume, position: Any, steps: StepPlan) -> None:
    """Checks that a run which resumes in its folder has the data and order of its checkpoint.

    A new run that begins from PATH may have others, which the log names.

    Args:
        resume: Checkpoint from which the run resumes.
        position: The checkpoint's data position.
        steps: Steps of the run, and the checksum of its tokens.

    Raises:
        ConfigError: The tokens or their order differ; names the key.
    """
    with untrusted(f"a checkpoint in '{resume.path}'", "the data position of a run"):
        trained = dict(position or {})
    for name, key, now in (
        ("data", "data.path", steps.data),
        ("seed", "training.seed", steps.order.seed),
    ):
        was = trained.get(name, now)
        if was != now and resume.required:  # another run's checkpoint may have had other data
            logger.info("the %s of the new run is not that of '%s'", name, resume.path)
        elif was != now:
            raise ConfigError(
                f"{key}: expected the {name} of the run that resumes from '{resume.path}' ({was}); "
                f"got others ({now}), or the order of another version. Restore the old data, "
                "tokenizer and settings of sft (or version of fullshard), use --resume never, or "
                "use --resume PATH with another output_dir."
            )


def check_model(
    resume: Resume,
    found: Found,
    model_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Checks that the checkpoint's weights are of the run's model and know its tokens.

    Weights also fit a model with another `rope_theta`, or tokens with other numbers: they
    would train on silently. A new run that begins from PATH may have another configuration,
    which the log names, but no other tokens.

    Raises:
        ConfigError: The tokenizer or the configuration differs; names a token or the keys.
    """
    key, cure = "model.name_or_path", "Restore the old one, use --resume never"
    for name in (CONFIG, "tokenizer.json")[: 2 if resume.required else 1]:
        if found.manifest is None or name not in found.manifest.files:
            continue
        with untrusted(found.files / name, "what a run saves beside its weights"):
            text = read_file(found.files / name).decode()
            if name == CONFIG:
                told = _told_settings(type(model_config), text, model_config.to_json_string())
            else:
                told = _told_tokens(text, tokenizer)
                key, cure = "data.tokenizer", "Set its folder, such as RUN/model"
        if told and name == CONFIG and resume.required:
            logger.info("the new run's model differs from the checkpoint's: %s", told)
        elif told:
            raise ConfigError(
                f"{key}: expected the {name} that was saved with the weights in '{resume.path}'; "
                f"it has changed ({told}). {cure}, or export the checkpoint and start from that "
                "folder."
            )


def _told_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The first tokens of a tokenizer.json that have other ids; a new run may add tokens."""
    from tokenizers import Tokenizer

    before, now = Tokenizer.from_str(text).get_vocab(), tokenizer.get_vocab()
    return _told(before, now, before)


def _told_settings(kind: type[PretrainedConfig], *texts: str) -> str:
    """The first settings in which two configurations differ, and which change a forward."""
    before, now = (_read_as(kind, text) for text in texts)
    return _told(before, now, [key for key in {**before, **now} if not _FREE_KEYS.search(key)])


def _told(before: dict[str, Any], now: dict[str, Any], keys: Iterable[str]) -> str:
    changed = sorted(key for key in keys if before.get(key) != now.get(key))
    return ", ".join(f"{key!r} {before.get(key)} -> {now.get(key)}" for key in changed[:3])


def _read_as(kind: type[PretrainedConfig], text: str) -> dict[str, Any]:
    """The settings in a configuration's text; some are read back in another form."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(text)
        file.flush()
        return flatten(kind.from_json_file(file.name).to_dict())


def position_of(found: Found) -> dict[str, Any]:
    """The data position in a complete checkpoint; empty if it has none."""
    return read_tables(found)[1]["state"].get(POSITION) or {}


def _from_path(path: Path) -> Resume:
    found = choose(ALONE, path, whole=False)
    with untrusted(found.path / STATE, "the data position of a run"):
        position = position_of(found)
        batch = natural(position["global_batch"]) if "global_batch" in position else None
    return Resume(path.resolve(), batch, required=True)


# ---- saving --------------------------------------------------------------------------------------


@dataclass
class RunCheckpoints(Keeper):
    """Saves a run's checkpoints in the background.

    Attributes:
        folder: Folder of the run.
        trainee: Model to save; with the tokenizer's files a checkpoint can be exported.
        steps: Steps with a checkpoint.
        limit: Number of complete checkpoints to keep; None: all.
        caught: Signals that ask this rank to save and stop.
        patience: State of early stopping, saved with the run.
    """

    folder: RunFolder
    trainee: Trainee
    steps: StepPlan
    limit: int | None
    caught: list[int]
    patience: Patience
    _saving: int | None = field(default=None, init=False)  # a save whose end is not recorded yet

    def __post_init__(self) -> None:
        self._texts = {**tokenizer_texts(self.folder.data), **self.trainee.texts}
        launch = read_launch_environment()
        self._is_first = launch is None or launch.rank == 0
        place = self.folder.checkpoints
        if self._is_first and self.steps.save_every is not None:
            if place != self.folder.path / IN_RUN:
                saving.SAVES.claim_folder(place)  # no other run or import may use it from now on
            _check_writable(place)

    @property
    def saves(self) -> bool:
        """Whether a run that is asked to stop is saved."""
        return self.steps.save_every is not None

    def asked_to_stop(self) -> bool:
        """Whether this rank was asked to save and stop."""
        return bool(self.caught)

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after a step that is not the last."""
        return self.saves and step % (self.steps.save_every or 1) == 0

    def keep(self, step: int, *, stopping: bool, last: bool) -> bool:
        """Saves if a checkpoint is due; returns whether it was.

        Raises:
            CheckpointError: The save could not begin, or the save before it failed.
            PreemptedError: The run was asked to stop. It is saved, unless it never saves.
        """
        self._record_saved()
        due = self.saves and (stopping or last or self.is_due(step))
        if due:
            watchdog.phase("saving", step)
            self._save(step, wait=stopping or last)
        if stopping:
            way_out = (
                "which was saved. Start it again to resume."
                if self.saves
                else "and saved nothing (save_strategy: no). The next start begins at step 0; "
                "remove save_strategy to be able to resume."
            )
            raise PreemptedError(
                f"run: expected to reach step {self.steps.num_steps}, was asked to stop after step "
                f"{step}, {way_out}"
            )
        return due

    def resume(self, resume: Resume) -> int:
        """Loads the newest usable checkpoint; returns the number of finished steps. A collective.

        A run without a checkpoint to resume from has no path, and begins at step 0.

        Raises:
            CheckpointError: None can be read, or it is of another model or optimizer.
            ConfigError: The run asks for no more steps than the checkpoint has, or has other data.
        """
        if resume.path is None:
            return 0
        state, path = self.trainee.load(resume.path)
        if not resume.required:  # the command has told what differs
            check_data(resume, state.get(POSITION), self.steps)
        # Losses of another run do not count: it may have had other data.
        self.patience.load_state_dict((resume.in_place and state.get(PATIENCE)) or {})
        if self._is_first:
            logger.info("resumed after step %s from %s", state["step"], path)
        resume.check_steps(int(state["step"] or 0), path, self.steps.num_steps)
        return int(state["step"] or 0)

    def _save(self, step: int, *, wait: bool) -> None:
        texts = dict(self._texts)
        if self.folder.config.is_file():
            texts[self.folder.config.name] = self.folder.config.read_text(encoding="utf-8")
        if self._is_first:
            check_lock(self.folder)
        values = {POSITION: self._position(step), PATIENCE: self.patience.state_dict()}
        settings = SaveSettings(step=step, wait=wait, keep=self.limit, texts=texts)
        self.trainee.save(self.folder.checkpoints, values, settings)
        self._saving = step
        self._record_saved()

    def _record_saved(self) -> None:
        """Records the step of a save that has ended, without which a start cannot be refused."""
        if self._saving is not None and not saving.SAVES.under_way:
            saving.SAVES.wait()  # raises the error of a save that failed: nothing was saved
            if self._is_first:
                self.folder.update_record(**{LAST_SAVED: self._saving})
            self._saving = None

    def _position(self, step: int) -> dict[str, Any]:
        """See [Note: data position]."""
        order = self.steps.order
        return {
            "global_batch": order.shape.global_batch,
            "samples_seen": step * order.shape.global_batch,
            "epoch": step / order.steps_per_epoch,
            "seed": order.seed,
            "data": self.steps.data,
        }


def _check_writable(place: Path) -> None:
    """Raises CheckpointError before the first step if an existing folder takes no checkpoint."""
    if not isinstance(place, StorePath) and place.is_dir():
        try:
            with tempfile.TemporaryFile(dir=place):
                pass  # permissions do not show read-only mounts
        except OSError as error:
            raise failure(place, 0, error) from error


def check_lock(folder: RunFolder) -> None:
    """Raises CheckpointError if another run has taken the store's place of the checkpoints."""
    place = folder.checkpoints
    if not isinstance(place, StorePath) or place.parts[0] == "memory:":  # each process has its own
        return
    with suppress(OSError):  # without a response, the lock's state is unknown
        if not is_holder(place, str(folder.read_record().get(HOLDS))):
            raise CheckpointError(
                f"training.checkpoint_dir: expected exclusive use of '{place}'; another run "
                "started there while this one did not respond. Checkpoints are no longer saved: "
                "stop one of the runs."
            )
