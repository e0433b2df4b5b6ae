"""Common behaviour of the command line: help, version, errors, --json, exit codes."""

import errno
import itertools
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.cli import outcome
from fullshard.cli.app import COMMANDS, invoke, run
from fullshard.config.environment import unknown_variables
from support import forked
from support.processes import free_port, python

ROOT = Path(__file__).parents[2]

# All slow imports, and all that an engine needs.
HEAVY = ("torch", "jax", "numpy", "transformers", "datasets", "matplotlib", "safetensors")


COMMAND = (sys.executable, "-m", "fullshard")


def process(*words, stdout=subprocess.PIPE, **variables):
    return subprocess.run(
        words,
        env={**os.environ, **variables},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


def closed_pipe():
    """The writing end of a pipe without a reader."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def test_help_imports_nothing_heavy():
    every = [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)]
    code = (
        "import sys, fullshard.config.load, fullshard.planner\n"
        "from fullshard.cli.app import run\n"
        f"for words in {every}:\n"
        "    assert run(words) == 0, words\n"
        f"    assert not {set(HEAVY)} & set(sys.modules), words\n"
    )
    python("-c", code)


def test_a_checkpoint_that_is_missing_is_found_before_torch_is_imported():
    code = (
        "import sys\n"
        "from fullshard.cli.app import run\n"
        "for word in ('--resume=nowhere', 'training.resume_from_checkpoint=nowhere'):\n"
        "    assert run(['train', word]) == 7\n"
        "assert 'torch' not in sys.modules\n"
    )
    python("-c", code)


def test_help_lists_every_command_and_no_planned_one(fullshard):
    done = fullshard("--help", code=0)
    lines = done.stdout.splitlines()
    listed = [words[1] for line in lines if len(words := line.split()) > 2 and words[0] == "\u2502"]
    assert [word for word in listed if word in COMMANDS] == list(COMMANDS)


def test_help_wraps_paragraphs_and_ends_with_an_example_and_the_place_of_keys(
    fullshard, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    shown = [line.strip() for line in fullshard("distill", "--help").stdout.splitlines()]
    first = next(i for i, line in enumerate(shown) if line.startswith("Without a configuration"))
    paragraph = shown[first : shown.index("", first)]
    assert len(paragraph) > 1
    for line, following in itertools.pairwise(paragraph):
        assert len(f" {line} {following.split()[0]} ") > 80 - 2
    assert "Example: fullshard distill teacher=FOLDER student=FOLDER data=texts/" in shown
    assert any("fullshard config schema" in line for line in shown)


@pytest.mark.parametrize("width", ["0", "99999999"])
def test_an_unusable_terminal_width_does_not_truncate_the_help(width):
    done = process(*COMMAND, "--help", COLUMNS=width, TERMINAL_WIDTH="wide")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Forecast the memory" in done.stdout
    assert len(done.stdout) < 20_000


def test_the_version_option_prints_the_version(fullshard):
    done = fullshard("--version", code=0)
    assert done.stdout.startswith("fullshard ")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [(["re"], ["report"]), (["plan", "--no"], ["--nodes"]), (["ckpt", "pr"], ["prune"])],
)
def test_a_shell_completes_commands_and_options(typed, offered):
    done = process(
        *COMMAND,
        _FULLSHARD_COMPLETE="complete_bash",
        COMP_WORDS=" ".join(["fullshard", *typed]),
        COMP_CWORD=str(len(typed)),
    )
    assert (done.stdout.split(), done.stderr) == (offered, "")


def test_a_file_that_is_no_checkpoint_is_named_as_typed(fullshard, tmp_path):
    text, out = str(tmp_path / "t.txt"), str(tmp_path / "out")
    Path(text).write_text("hello")
    for words in (["ckpt", "diff", text, text], ["ckpt", "import", text, out]):
        done = fullshard(*words, code=7)
        assert f"CheckpointError: {text}: expected a file of torch.save" in done.stderr
    done = fullshard("train", "--dry-run", "--resume", text, code=7)
    assert "CheckpointError: --resume: expected a checkpoint or a folder" in done.stderr


def test_a_home_folder_after_an_equals_sign_is_expanded(fullshard, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    done = fullshard("plan", "--gpus", "2xH100-80GB", "--out=~/none/page.html", code=2)
    assert f"got '{tmp_path}/none/page.html' (No such file or directory)" in done.stderr


def test_a_working_directory_that_was_removed_is_named(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(["ckpt", "ls", str(tmp_path)]) == 2
    assert "working directory: expected a folder that exists; it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("SIGTERM", 75, "verify: expected to reach its end, got SIGTERM. Run the command again."),
        ("SIGINT", 130, "interrupted"),
    ],
)
def test_a_signal_ends_any_command_with_its_code_and_a_message(
    monkeypatch, capsys, name, code, said
):
    def load(*_):
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was ignored")

    number = signal.Signals[name]
    monkeypatch.setattr("fullshard.cli.verify.load", load)
    default = number == signal.SIGINT and signal.default_int_handler
    before = signal.signal(number, default or signal.SIG_IGN)
    try:
        done = invoke(["verify"])
    finally:
        signal.signal(number, before)
    assert done.exit_code == code
    assert (done.result or {})["error"]["message"] == said
    assert said.lower() in capsys.readouterr().err.lower()


def test_running_without_a_command_shows_the_help(fullshard):
    done = fullshard(code=2)
    assert "Usage: fullshard" in done.stdout


@pytest.mark.parametrize("words", ["--help", "--version"])
def test_a_reader_that_closes_the_pipe_causes_no_error(words):
    with closed_pipe() as nobody:
        assert process(*COMMAND, words, stdout=nobody).stderr == ""


def test_closed_streams_become_dev_null_and_keep_their_numbers():
    program = (
        "import os, sys; from fullshard.cli.app import open_streams; open_streams();"
        "print('x'); print('y', file=sys.stderr);"
        "found = [os.path.realpath(f'/proc/self/fd/{n}') for n in range(3)];"
        "sys.exit(found != ['/dev/null'] * 3 or not all(map(os.get_inheritable, range(3))))"
    )
    closed = f'{sys.executable} -c "$0" <&- >&- 2>&-'
    assert process("sh", "-c", closed, program).returncode == 0
    done = process("sh", "-c", f"{sys.executable} -m fullshard --version >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_character_that_the_locale_lacks_is_escaped():
    program = "from fullshard.cli.app import open_streams; open_streams(); print('caf\\xe9')"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env={**os.environ, **plain}, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"caf\\xe9\n")


def test_with_json_a_failing_rank_0_of_a_launcher_prints_one_object(tmp_path):
    (tmp_path / "a.txt").write_text("too short")
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    words = [f"data.path={tmp_path}/a.txt", f"output_dir={tmp_path}/run", "--json"]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [*COMMAND, "train", *words]
    env = {**os.environ, **variables, **place}
    done = forked.run(words, env=env, capture_output=True, text=True, timeout=60)
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "DataError"
    assert error["exit_code"] == done.returncode != 0
    assert error["message"].startswith("command line: data.path: expected at least")


def test_json_that_cannot_be_written_causes_no_traceback():
    command = (*COMMAND, "config", "schema", "--json")
    with closed_pipe() as nobody:
        done = process(*command, stdout=nobody)
    assert (done.returncode, done.stderr) == (1, "")
    for command in ((*COMMAND, "config", "schema", "--json"), (*COMMAND, "--version")):
        with Path("/dev/full").open("w") as full:
            done = process(*command, stdout=full)
        assert done.returncode == 3
        said = "WillNotFitError: disk: expected room to write the command's output, got none"
        assert done.stderr.startswith(said)
        assert len(done.stderr.splitlines()) == 1
    words = [*COMMAND, "ckpt", "ls", "/nowhere/at/all"]
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(words, stderr=full, check=False).returncode == 7


@pytest.mark.parametrize("how", ["a command", "a relay of rank 0", "/dev/full"])
def test_output_to_a_non_blocking_pipe_is_complete(tmp_path, how):
    program = "from fullshard.cli.app import open_streams; open_streams(); print('x' * 10**6)"
    log = how if how == "/dev/full" else tmp_path / "log"  # as with a relay
    if how != "a command":
        program = (
            "import os, sys; from pathlib import Path; from fullshard.launch.spawn import Relay\n"
            f"relay = Relay(Path({str(log)!r})); out = os.dup(relay.stdout_fd)\n"
            "relay.start(); os.write(out, b'x' * 10**6); os.close(out); relay.close(60.0)\n"
        )
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=writing, stderr=subprocess.PIPE) as started:
        while started.poll() is None and select.select([], [writing], [], 0.01)[1]:
            pass  # fills the pipe
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.read().count(b"x") == 10**6
        said = b"/dev/full ends here: No space left on device\n" if log == how else b""
        assert started.stderr.read() == said


@pytest.mark.parametrize(
    "words",
    [
        ["tran"],
        ["sftt"],
        ["xyzzy"],
        ["--versoin"],
        ["plan", "--gpu", "8"],
        ["plan", "--nodes", "none"],
        ["ckpt", "prune", ".", "--keep", "0"],
        ["plan", "max_stps=3"],
        ["plan", "--max_stps", "3"],
        ["plan", "--config", "a.yaml", "b.yaml"],
        ["plan", "examples/plan_llama_405.yaml"],
    ],
)
def test_a_mistyped_command_line_is_one_block_with_the_way_out(capfd, monkeypatch, snapshot, words):
    monkeypatch.chdir(ROOT)
    assert run(words) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert f"fullshard {' '.join(words)}\n{err}" == snapshot


@pytest.mark.parametrize(
    "words",
    [["--json", "distill", "teecher=x"], ["plan", "--json", "--nodes", "0"], ["ckpt", "--json"]],
)
def test_with_json_an_error_is_one_object_on_stdout_too(fullshard, words):
    done = fullshard(*words, code=2)
    error = json.loads(done.stdout)["error"]
    assert set(error) == {"type", "message", "exit_code"}
    assert (error["type"], error["exit_code"]) == ("ConfigError", 2)
    assert done.stderr == f"ConfigError: {error['message']}\n"


ENDS = """
import os, sys
from fullshard import errors
from fullshard.cli import outcome

as_json = "--json" in sys.argv
with outcome.quiet_stdout(as_json) as stdout:
    print("printed by Python")
    sys.stdout.flush()
    os.system("echo printed by a child")
    try:
        {body}
    except BaseException as error:
        done = outcome.error_outcome(error)
    if as_json:
        outcome.write_json(done.result, stdout)
sys.exit(done.exit_code)
"""


def process_that(body, *words):
    return process(sys.executable, "-c", ENDS.format(body=body), *words)


def test_with_json_only_the_object_reaches_stdout():
    body = "done = outcome.Outcome({'answer': 42})"
    done = process_that(body, "--json")
    assert json.loads(done.stdout) == {"answer": 42}
    assert done.stderr == "printed by Python\nprinted by a child\n"
    plain = process_that(body)
    assert plain.stdout == "printed by Python\nprinted by a child\n"


@pytest.mark.parametrize(
    ("error", "code", "last_line"),
    [
        ("errors.ConfigError('k: no')", 2, "ConfigError: k: no"),
        ("errors.WillNotFitError('k: no')", 3, "WillNotFitError: k: no"),
        ("errors.DataError('k: no')", 6, "DataError: k: no"),
        ("errors.PreemptedError('k: no')", 75, "PreemptedError: k: no"),
        ("KeyboardInterrupt()", 130, "Interrupted."),
    ],
)
def test_user_errors_have_no_traceback(error, code, last_line):
    done = process_that(f"raise {error}")
    assert done.returncode == code
    assert done.stderr == last_line + "\n"


@pytest.mark.parametrize(
    ("error", "code"), [("ZeroDivisionError('no')", 1), ("MemoryError('no')", 4)]
)
def test_unexpected_errors_show_their_traceback(error, code):
    done = process_that(f"raise {error}", "--json")
    assert done.returncode == code
    assert "Traceback (most recent call last):" in done.stderr
    shown = json.loads(done.stdout)["error"]
    assert shown["exit_code"] == code
    assert "Traceback" in shown["traceback"]


@pytest.mark.parametrize("words", [["--resume", "nowhere"], ["--", "--resume", "nowhere"]])
def test_flags_of_a_launcher_may_follow_two_dashes(words, capfd):
    assert run(["train", "max_steps=1", *words]) == 7
    assert "got 'nowhere', which does not exist" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "meant"),
    [
        (("ckpt", "lss", "run"), 2, "ls"),
        (("bench", "stpe"), 2, "step"),
        (("ckpt", "verify", "rnu"), 7, "run"),
        (("ckpt", "import", "rnu", "new"), 7, "run"),
        (("ckpt", "diff", "rnu", "run"), 7, "run"),
        (("report", "rnu"), 2, "run"),
        (("generate", "rnu"), 2, "run"),
        (("launch", "scirpt.py"), 2, "script.py"),
        (("plan", "rnu/config"), 2, "run"),
        (("plan", "--table", "run.ymal"), 2, "run.yaml"),
        (("train", "data=text.tx"), 6, "text.txt"),
        (("train", "--resume", "nevr"), 2, "never"),
        (("train", "freeze=[model.layres.*]"), 2, "model.layers.*"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest_one(
    tmp_path, monkeypatch, capfd, words, code, meant
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("run.yaml", "script.py", "text.txt"):
        (tmp_path / name).touch()
    assert run(words) == code
    assert f"Did you mean '{meant}'?" in capfd.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("train", "PIPE"),
        ("train", "data=PIPE"),
        ("plan", "--table", "PIPE"),
        ("plan", "--calibration", "PIPE"),
        ("ckpt", "import", "PIPE", "new"),
    ],
)
@pytest.mark.timeout(60)
def test_a_pipe_is_refused_instead_of_awaited(tmp_path, monkeypatch, capfd, words):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("PIPE")
    assert run(words) in (2, 6, 7)
    said = capfd.readouterr().err
    assert "'PIPE'" in said or "PIPE: " in said
    assert "Traceback" not in said


def outcome_of(error):
    try:
        raise error
    except (OSError, UnicodeError):
        return outcome.error_outcome(error)


NOT_UTF_8 = UnicodeEncodeError("utf-8", os.fsdecode(b"runs/a\xff"), 6, 7, "surrogates not allowed")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NOT_UTF_8, r"'runs/a\udcff': expected names in UTF-8"),
        (UnicodeEncodeError("utf-8", 'a"b\n"c\udcff"', 6, 7, ""), r"'c\udcff': expected names in"),
        *(
            (OSError(number, os.strerror(number), "a.html"), "'a.html': expected a usable path")
            for number in (errno.EACCES, errno.EROFS, errno.EISDIR)
        ),
    ],
)
def test_an_unusable_folder_is_an_error_without_a_traceback(error, said, capsys):
    assert outcome_of(error).exit_code == 2
    found = capsys.readouterr().err
    assert found.startswith(f"ConfigError: {said}")
    assert getattr(error, "strerror", "") in found
    assert "Traceback" not in found


def test_a_missing_file_without_a_check_keeps_its_traceback(capsys):
    error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "no/such/file")
    assert outcome_of(error).exit_code not in (0, 2)
    assert "Traceback" in capsys.readouterr().err


SECOND = """\
import atexit, signal
from fullshard.cli import app
app.run = lambda words: 75  # what a first signal brought
atexit.register(signal.raise_signal, signal.SIGTERM)
app.main()
"""


def test_a_second_signal_at_the_end_leaves_the_exit_code():
    assert subprocess.run([sys.executable, "-c", SECOND], check=False).returncode == 75


LINGERS = """\
import os, signal, sys, threading, time
from fullshard.cli import app
code, number, limit_s = map(int, sys.argv[1:])
app.run = lambda words: code
def linger():
    time.sleep(1)
    os.kill(os.getpid(), number)
    time.sleep(limit_s)
    print("done")
threading.Thread(target=linger).start()
app.main()
"""


def lingered(*words, **streams):
    command = [sys.executable, "-c", LINGERS, *map(str, words)]
    return subprocess.run(command, check=False, timeout=30, **streams)


def test_a_signal_at_the_end_does_not_wait_for_threads():
    assert lingered(75, signal.SIGTERM.value, 60).returncode == 75


def test_a_warning_at_the_end_lets_threads_finish():
    done = lingered(0, signal.SIGUSR1.value, 1, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, b"done\n")


LOSES = """\
import sys
from fullshard.launch.exit_codes import end_now
sys.stdout = open(1, "w")
print("lost")
end_now(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("code", "expected"), [(0, 120), (75, 75)])
def test_output_lost_at_the_end_fails_the_command(code, expected):
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", LOSES, str(code)]
        assert subprocess.run(command, check=False, stdout=full).returncode == expected


def test_a_misspelt_variable_is_reported_once():
    done = process(*COMMAND, "--version", FULLSHARD_TIMOUT="5")
    said = "FULLSHARD_TIMOUT has no effect. Did you mean 'FULLSHARD_TIMEOUT'?\n"
    assert (done.returncode, done.stderr) == (0, said)


def test_unused_variables_are_reported_by_the_first_rank(monkeypatch):
    for name in ("LAUNCHER", "ATTEMPT", "MASTER_ADDR", "LOG_DIR"):
        monkeypatch.setenv(f"FULLSHARD_{name}", "1")
    said = [text.partition(" has no effect. ") for text in unknown_variables()]
    assert [name.removeprefix("FULLSHARD_") for name, *_ in said] == [
        *("ATTEMPT", "LAUNCHER", "LOG_DIR", "MASTER_ADDR")
    ]
    assert said[0][2] == "It is set for ranks that fullshard starts."
    torchrun = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    assert [text.split()[0] for text in unknown_variables()] == [
        *("FULLSHARD_ATTEMPT", "FULLSHARD_LAUNCHER", "FULLSHARD_MASTER_ADDR")
    ]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert unknown_variables() == []
    monkeypatch.setenv("FULLSHARD_RANK", "0")
    monkeypatch.setenv("FULLSHARD_WORLD_SIZE", "1")
    monkeypatch.setenv("FULLSHARD_LOCAL_RANK", "0")
    monkeypatch.setenv("FULLSHARD_LOCAL_WORLD_SIZE", "1")
    assert [text.split()[0] for text in unknown_variables()] == ["FULLSHARD_LAUNCHER"]
    monkeypatch.delenv("FULLSHARD_WORLD_SIZE")  # an incomplete set, because one name is misspelt
    monkeypatch.setenv("FULLSHARD_WORLDSIZE", "1")
    assert [text.split()[0] for text in unknown_variables()] == [
        *("FULLSHARD_LAUNCHER", "FULLSHARD_WORLDSIZE")
    ]
    assert "Did you mean 'FULLSHARD_WORLD_SIZE'?" in unknown_variables()[1]
