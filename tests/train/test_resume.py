"""Interrupted runs resume automatically, with the losses of an uninterrupted run."""

import json
import os
import shutil
import signal
import sys
import time

import psutil
import pytest

from fullshard.data.text import Dataset
from fullshard.launch.run_lock import RunLock
from fullshard.run import start as run_start
from fullshard.run.folder import RunFolder, begin
from support import forked as subprocess
from support import runs
from support.processes import free_port, python

pytestmark = pytest.mark.timeout(300)  # a test has up to three runs, each with its own limit

STEPS = 24
KILLED = ("rank 1", "all")
CONFIG = """\
model:
  config: {{model_type: llama, vocab_size: 300, hidden_size: 32, intermediate_size: 64,
            num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2,
            max_position_embeddings: 64}}
data: {{path: {text}, validation_fraction: 0.1}}
training: {{output_dir: {folder}/run, max_steps: {steps}, per_device_train_batch_size: 3,
            max_seq_length: 32, learning_rate: 1e-3, save_steps: 8, eval_steps: 12}}
launch: {{num_processes: 2}}
"""


def write(folder, text=None):
    text = text or folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{i} and {i} is {i + i}.\n" for i in range(500)))
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(folder=folder, text=text, steps=STEPS))
    return path


def start(config, *words):
    command = [sys.executable, "-m", "fullshard", "train", str(config), *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )


def finish(config, *words, code=0):
    process = start(config, *words)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == code, said
    return said


def numbers(config):
    return runs.numbers(config.parent / "run")


def at_step(config, step, process):
    """Returns once a step's row is written."""
    while f"loss {step}" not in numbers(config):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The uninterrupted run."""
    config = write(tmp_path_factory.mktemp("calm"))
    finish(config)
    return config


def test_a_run_saves_its_last_step_and_every_few(calm):
    checkpoints = calm.parent / "run" / "checkpoints"
    names = ["step-00000008", "step-00000016", "step-00000024"]
    assert sorted(path.name for path in checkpoints.iterdir()) == names
    state = json.loads((checkpoints / names[1] / "state.json").read_text())["state"]
    assert state["position"]["samples_seen"] == 16 * 6
    assert state["position"]["global_batch"] == 6


@pytest.mark.long
@pytest.mark.parametrize(
    "whom", ["sigterm", *(pytest.param(w, marks=pytest.mark.slow) for w in KILLED)]
)
def test_a_stopped_run_resumes_with_the_same_losses(calm, tmp_path, whom):
    config = write(tmp_path)
    restarts = ("--max-restarts", "1") if whom == "rank 1" else ()
    process = start(config, *restarts)
    at_step(config, 6, process)
    if whom == "sigterm":
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 75, said
        record = json.loads((tmp_path / "run" / "run.json").read_text())
        assert (record["status"], record["exit_code"]) == ("interrupted", 75)
        saved = max(int(path.name[-2:]) for path in (tmp_path / "run" / "checkpoints").iterdir())
        assert 6 <= saved < STEPS
        assert record["last_saved_step"] == saved
        (tmp_path / "run" / "checkpoints").rename(tmp_path / "away")
        assert f"the run's own checkpoints, of steps up to {saved}" in finish(config, code=7)
        (tmp_path / "away").rename(tmp_path / "run" / "checkpoints")
        assert f"resumed after step {saved}" in finish(config)
    elif whom == "rank 1":
        os.kill(psutil.Process(process.pid).children()[-1].pid, signal.SIGKILL)
        said, _ = process.communicate(timeout=100)
        assert process.returncode == 0, said
        assert "restart 1 of 1 after: rank" in said
        assert "was killed by SIGKILL" in said
    else:
        process.kill()
        process.communicate()
        said = finish(config)
        assert "resuming the run in" in said
    assert numbers(config) == numbers(calm)
    if whom == "sigterm":  # as if it had been killed after its last step, without its rows
        RunFolder(tmp_path / "run").update_record(status="running")
        (tmp_path / "run" / "metrics.jsonl").unlink()
        assert "all steps were already done" in finish(config)


@pytest.mark.slow
def test_more_steps_other_ranks_and_a_damaged_checkpoint(calm, tmp_path):
    """The newest checkpoint is damaged, and the run continues for longer on three ranks."""
    config = write(tmp_path, calm.parent / "text.txt")
    shutil.copytree(calm.parent / "run", tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000024"
    with (newest / "model-00001.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    said = finish(config, "num_processes=3", "max_steps=26")
    assert f"skipped checkpoint {newest}" in said
    assert "model-00001.safetensors has other bytes" in said
    assert "resumed after step 16" in said
    assert "2 per rank x 1 micro-batch(es) x 3 rank(s) = 6 sequences" in said
    found, wanted = numbers(config), numbers(calm)
    assert sorted(int(key.split()[1]) for key in found if key.startswith("loss")) == [*range(1, 27)]
    for step in range(1, 17):
        assert found[f"loss {step}"] == wanted[f"loss {step}"]
    # The learning rate decays longer now; the first loss after the resume uses the old weights.
    assert found["loss 17"] == pytest.approx(wanted["loss 17"], abs=1e-5)


def unusable(folder, how):
    """Makes every checkpoint one of a later format, or flips a bit; returns all files."""
    for path in (folder / "checkpoints").iterdir():
        last = path / "COMPLETE.json"
        if how == "newer":
            last.write_text(last.read_text().replace('"version": 1', '"version": 2'))
        else:
            weights = bytearray((path / "model-00000.safetensors").read_bytes())
            weights[-1] ^= 1
            (path / "model-00000.safetensors").write_bytes(weights)
    found = {str(p.relative_to(folder)): p for p in folder.glob("checkpoints/*/*")}
    return {name: path.read_bytes() for name, path in found.items()}


@pytest.mark.parametrize("how", ["newer", pytest.param("damaged", marks=pytest.mark.slow)])
def test_a_run_never_trains_over_checkpoints_that_it_cannot_read(calm, tmp_path, how):
    config = write(tmp_path, calm.parent / "text.txt")
    shutil.copytree(calm.parent / "run", tmp_path / "run")
    before = unusable(tmp_path / "run", how)
    said = finish(config, "max_steps=26", code=7)
    assert "`fullshard train --resume never` moves this run aside and starts again" in said
    assert unusable(tmp_path / "run", "newer") == before or how == "damaged"
    if how == "damaged":
        assert "has other bytes than were written" in said
        finish(config, "max_steps=2", "save_steps=2", "--resume", "never")
        assert len(list((tmp_path / "run.1" / "checkpoints").iterdir())) == 3
        assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.slow
def test_a_run_starts_from_another_runs_checkpoint(calm, tmp_path):
    config = write(tmp_path)
    path = calm.parent / "run" / "checkpoints" / "step-00000008"
    finish(config, "--resume", str(path))
    found, wanted = numbers(config), numbers(calm)
    late = {key: value for key, value in wanted.items() if int(key.split()[1]) > 8}
    assert found == late


@pytest.mark.slow
def test_a_start_that_another_one_overtakes_names_it(calm, tmp_path, monkeypatch, fullshard):
    run = shutil.copytree(calm.parent / "run", tmp_path / "run")
    decided, held = run_start.continues, []

    def overtaken(*words):
        found = decided(*words)
        run.rename(tmp_path / "run.1")
        run.mkdir()
        held.append(RunLock(run))
        return found

    monkeypatch.setattr(run_start, "continues", overtaken)
    done = fullshard("train", calm, f"output_dir={run}", "max_steps=26", "--dry-run", code=2)
    assert "training.output_dir: expected a folder that no run uses" in done.err


def test_a_run_started_by_another_process_since_the_check_is_not_changed(
    tmp_path, monkeypatch, fullshard
):
    """This start has not compared its data, model and steps."""
    config, run = write(tmp_path), tmp_path / "run"
    with begin(run, "train"):
        pass
    held = []

    def overtaken(*words):
        found = prepared(*words)
        with begin(run, "sft") as (folder, _):
            held.append(folder.record.read_bytes())
        return found

    prepared = run_start.prepare_run
    monkeypatch.setattr(run_start, "prepare_run", overtaken)
    monkeypatch.setattr(Dataset, "save", lambda *_: pytest.fail("it wrote its data"))
    done = fullshard("train", config, code=2)
    assert "where another start began a run meanwhile" in done.err
    assert (run / "run.json").read_bytes() == held[0]


@pytest.mark.short(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_while_the_data_is_written_is_recorded(tmp_path, monkeypatch, fullshard, number):
    saved = Dataset.save

    def stop(self, folder):
        os.kill(os.getpid(), number)
        saved(self, folder)

    monkeypatch.setattr(Dataset, "save", stop)
    config = write(tmp_path)
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        done = fullshard("train", config)
    finally:
        signal.signal(number, before)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (done.exit_code, record["status"], record["exit_code"]) == (75, "interrupted", 75)
    assert f"got {number.name}. Start it again" in done.err
    assert record["error"]["message"] in done.err


STOPPED = """
import os, signal
from fullshard.cli.app import main
from fullshard.run import session
session.train = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
main()
"""


@pytest.mark.long
def test_a_rank_of_another_launcher_writes_a_page_and_tells_of_the_older_run(tmp_path):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    (tmp_path / "stopped.py").write_text(STOPPED)
    words = (tmp_path / "stopped.py", "train", write(tmp_path), "num_processes=1")
    python(*words, run=subprocess.run, env=os.environ | place | ranks, code=75)
    assert "interrupted" in (tmp_path / "run" / "report.html").read_text()
    place["MASTER_PORT"] = str(free_port())
    again = python(
        *words, "--resume=never", run=subprocess.run, env=os.environ | place | ranks, code=75
    )
    assert f"moved the older run in {tmp_path / 'run'} to {tmp_path / 'run'}.1" in again.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("max_steps=26",), 0, "the run there resumes with the model and optimizer of step 24 in"),
        (
            ("max_steps=26", "launch.num_processes=1"),
            0,
            "the run there resumes with the model and optimizer",
        ),
        ((), 0, "begins at step 0; the existing run is moved aside"),
        (("max_steps=26", "adam_beta1=0.5"), 0, "training.adam_beta1 0.9 -> 0.5"),
        (("max_steps=26", "train_batch_size=8"), 0, "6 samples per step stay, as the resumed run"),
        (("--resume", ""), 2, "--resume: expected auto, never or the path of a checkpoint, got ''"),
        (("max_steps=26", "optim=sgd"), 7, "expected the states of SGD; it has AdamW"),
        (
            ("model.config.num_hidden_layers=3", "max_steps=26"),
            2,
            "model.config.num_hidden_layers: expected the value of the run that resumes",
        ),
        (
            ("max_steps=26", "seed=1"),
            2,
            "training.seed: expected the value of the run that resumes",
        ),
        (("max_steps=26", "freeze=*.layers.0.*"), 2, "freeze: expected the value of the run"),
        (
            ("--resume", "RUN", "output_dir=NEW", "max_steps=26"),
            0,
            "a new run starts with the model and optimizer",
        ),
        (("--resume", "RUN"), 2, "max_steps: expected more than the 24 steps of"),
        (
            ("--resume", "RUN", "max_steps=26", "freeze=*.layers.0.*"),
            7,
            "only it trains model.layers.0.",
        ),
        (
            ("--resume", "RUN", "max_steps=26", "model.config.num_hidden_layers=3"),
            7,
            "the checkpoint has no such tensor",
        ),
        (
            ("--resume", "RUN", "max_steps=26", "model.config.num_hidden_layers=1"),
            7,
            "it also has model.layers.1.",
        ),
        (
            ("--resume", "RUN", "max_steps=26", "model.config.hidden_size=64"),
            7,
            "of shape (300, 64); got (300, 32",
        ),
    ],
)
def test_dry_run_says_what_a_resume_would_do_or_refuse(
    calm, tmp_path, monkeypatch, fullshard, caplog, words, code, said
):
    monkeypatch.chdir(tmp_path)
    run = str(calm.parent / "run")
    words = [word.replace("RUN", run).replace("NEW", "new") for word in words]
    done = fullshard("train", calm, *words, "--dry-run", code=code)
    assert said in done.out + done.err + caplog.text


def test_dry_run_names_the_checkpoint_that_a_restart_loads(calm, tmp_path, fullshard):
    shutil.copytree(calm.parent / "run", tmp_path / "run")
    state = tmp_path / "run" / "checkpoints" / "step-00000024" / "state.json"
    state.write_text(state.read_text().replace("{", "[", 1))  # with the same size
    done = fullshard("train", calm, f"output_dir={tmp_path}/new", "max_steps=26", "--dry-run",
                     "--resume", tmp_path / "run", code=0)  # fmt: skip
    assert "a new run starts with the model and optimizer of step 16" in done.out + done.err


def test_a_resumed_run_keeps_its_tokens_and_reads_its_record(calm, tmp_path, fullshard):
    config = write(tmp_path)
    shutil.copytree(calm.parent / "run", tmp_path / "run")
    words = ("train", config, "max_steps=26", "--dry-run")
    for file in ("data/dataset.json", "config.yaml"):  # the run's folder is another one
        path = tmp_path / "run" / file
        path.write_text(path.read_text().replace(str(calm.parent), str(tmp_path)))
    assert fullshard(*words).exit_code == 0
    model = tmp_path / "run" / "checkpoints" / "step-00000024" / "config.json"
    kept = model.read_text()
    model.write_text(kept.replace('"num_attention_heads": 2', '"num_attention_heads": 4'))
    changed = fullshard(*words)
    assert changed.exit_code == 2
    assert "has changed ('num_attention_heads' 4 -> 2" in changed.err
    model.write_text(kept)
    text = tmp_path / "text.txt"
    text.write_text(text.read_text().replace("1 and 1 is 2", "1 and 1 is 3", 1))  # as many tokens
    shutil.rmtree(tmp_path / "run" / "data")  # as after a kill while its parts were replaced
    changed = fullshard(*words, code=2)
    assert "data.path: expected the data of the run that resumes" in changed.err
    record = json.loads((calm.parent / "run" / "run.json").read_text())
    del record["last_saved_step"]
    unsaved = json.dumps({**record, "status": "failed"})  # it stopped before its first save
    (tmp_path / "run" / "run.json").write_text(unsaved)
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "aside")
    assert "6 samples per step stay" in fullshard(*words, "train_batch_size=8", code=0).err
    (tmp_path / "aside").rename(tmp_path / "run" / "checkpoints")
    for wrong in ({"planned": "x"}, {"planned": {"samples_per_step": -4}}, {"measured": None}):
        record = json.loads((calm.parent / "run" / "run.json").read_text())
        (tmp_path / "run" / "run.json").write_text(json.dumps({**record, **wrong}))
        broken = fullshard(*words, code=2)
        assert "run.json: expected the record of a run" in broken.err
