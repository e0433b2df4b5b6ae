"""TrainingArguments one by one: python arguments_job.py ddp|sharded FOLDER [NAME ...].

Each case trains a small model for a few steps on the ranks that run the script, and writes
FOLDER/MODE/NAME.json: the log, metrics, names of files and the error, if any. The weights are in
FOLDER/MODE/NAME/final. To run all cases by hand, with PYTHONPATH=tests:

    fullshard launch --nproc-per-node 2 tests/integrations/arguments_job.py ddp FOLDER
    fullshard launch --nproc-per-node 2 tests/integrations/arguments_job.py sharded FOLDER
    python tests/integrations/arguments_job.py compare FOLDER
"""

import concurrent.futures
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM, TrainerCallback, TrainingArguments

from support.trainers import llama_config, t5

NOT_COMPARED = ("runtime", "_per_second", "preparation_time", "_mem_", "init_mem")
OPTIMIZER_FILES = ("optimizer.pt", "scheduler.pt", "fullshard")

TRIED = yaml.safe_load(Path(__file__).with_name("arguments.yaml").read_text())
CASES: dict[str, dict[str, Any]] = TRIED["cases"]


class Stop(transformers.EarlyStoppingCallback):
    """A callback with a state in checkpoints."""


class Seen(TrainerCallback):
    """Lists the callbacks that were called, each once, in order."""

    def __init__(self):
        self.names = []

    def __getattribute__(self, name):
        if name.startswith("on_") and name not in self.names:
            self.names.append(name)
        return super().__getattribute__(name)


class Hub:
    """Replaces the hub, which tests must not call; records uploads in order."""

    def __init__(self):
        self.sent = []

    def create_repo(self, name, **more):
        self.sent.append(["create", name, more["private"]])
        return types.SimpleNamespace(repo_id=name)

    def upload_folder(self, *, repo_id, folder_path, revision, commit_message, **more):
        names = sorted(path.name for path in Path(folder_path).iterdir())
        unlike = (
            *OPTIMIZER_FILES,
            "checkpoint-",
            "rng_state_1",
        )  # rank 0 does not wait for files of other ranks
        kept = [name for name in names if not name.startswith(unlike)]
        self.sent.append([repo_id, commit_message, revision, more.get("path_in_repo"), kept])
        done = concurrent.futures.Future()
        done.set_result(None)
        return done


def model(case):
    torch.manual_seed(0)
    if case.get("_t5"):
        return t5(96)
    config = llama_config(96, hidden_size=64, intermediate_size=96)
    kind = Narrow if "_most_rows" in case else LlamaForCausalLM
    found = kind(config).to(getattr(torch, case.get("_dtype", "float64")))
    if case.get("_unused"):
        found.spare = nn.Linear(8, 8, dtype=torch.float64)
    return found


class Narrow(LlamaForCausalLM):
    """Runs out of memory with more than two rows, as a device would."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **more):
        if self.training and len(input_ids) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB.")
        return super().forward(input_ids, attention_mask, labels=labels, **more)


def rows(case):
    """Returns 41 rows with ragged labels, so that the last batch is short."""
    generator = torch.Generator().manual_seed(1)
    for at in range(41):
        tokens = torch.randint(3, 96, (16,), generator=generator).tolist()
        yield {
            "input_ids": tokens, "attention_mask": [1] * (16 - at % 3) + [0] * (at % 3),
            "labels": [-100] * (at % 7) + tokens[at % 7 :], "how_long": 16 - at % 5,
        }  # fmt: skip


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __init__(self, case):
        self.case = case

    def __iter__(self):
        return rows(self.case)


def collate(batch):
    names = ("input_ids", "attention_mask", "labels")
    return {name: torch.tensor([row[name] for row in batch]) for name in names}


def accuracy(seen, compute_result=True):
    predictions, labels = seen.predictions, seen.label_ids
    if not isinstance(predictions, list):
        predictions, labels = [predictions], [labels]
    right = all_of_them = 0
    for scores, wanted in zip(predictions, labels, strict=True):
        scores, wanted = torch.as_tensor(scores), torch.as_tensor(wanted)
        known = wanted[:, 1:] != -100
        right += int(((scores[:, :-1].argmax(-1) == wanted[:, 1:]) & known).sum())
        all_of_them += int(known.sum())
    more = {"inputs": float(torch.as_tensor(seen.inputs).sum())} if seen.inputs is not None else {}
    if seen.losses is not None and not compute_result:
        more["losses"] = float(torch.as_tensor(seen.losses).sum())
    return {"accuracy": right / all_of_them, "labels": all_of_them, **more}


def lengths(seen):
    kept = [[int(token) for token in row if token > 0] for row in seen.predictions]
    return {"lengths": [len(row) for row in kept], "tokens": [x for row in kept for x in row]}


def metrics_of(case):
    if case.get("predict_with_generate"):
        return lengths
    return None if case.get("_packed") or case.get("_t5") else accuracy


def trainer_of(mode, case):
    kind = transformers.Seq2SeqTrainer if case.get("_t5") else transformers.Trainer
    if mode == "ddp":
        return kind
    from fullshard.integrations.transformers import sharded

    return sharded(kind)


def settings(case, folder, mode):
    given = {k: v for k, v in case.items() if not k.startswith("_")}
    if mode == "ddp" and case.get("_ours"):
        given = {}
    if "_parallelism" in case:
        from accelerate import ParallelismConfig

        given["parallelism_config"] = ParallelismConfig(**case["_parallelism"])
    if case.get("_generation"):
        given["generation_config"] = transformers.GenerationConfig(
            max_length=5, decoder_start_token_id=0, pad_token_id=0, eos_token_id=[1, 2, 3]
        )
    kind = transformers.Seq2SeqTrainingArguments if case.get("_t5") else TrainingArguments
    return kind(output_dir=str(folder), **{**TRIED["common"], **given})


def train(mode, case, folder, resume=None):
    data = list(rows(case))
    seen, hub = Seen(), Hub()
    transformers.trainer.hf_api = lambda: hub
    if case.get("_packed"):
        data = [{name: row[name] for name in ("input_ids", "labels")} for row in data]
    packed = transformers.DataCollatorWithFlattening()
    trainer = trainer_of(mode, case)(
        model=model(case), args=settings(case, folder, mode),
        train_dataset=Stream(case) if case.get("_iterable") else data, eval_dataset=data[:13],
        compute_metrics=metrics_of(case),
        data_collator=packed if case.get("_packed") else collate,
        callbacks=[seen, *([Stop(3)] if case.get("_stop") else [])],
    )  # fmt: skip
    if case.get("_only") != "eval":
        trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate()
    history = trainer.state.log_history
    trainer.save_model(str(folder / "final"))
    return {
        "history": [clean(row) for row in history],
        "metrics": clean(metrics),
        "parameters": trainer.get_num_trainable_parameters(),
        "tokens": trainer.state.num_input_tokens_seen,
        "best": trainer.state.best_metric,
        "callbacks": seen.names,
        "hub": hub.sent,
    }


def clean(row):
    kept = {k: v for k, v in row.items() if not any(word in k for word in NOT_COMPARED)}
    return {k: float(v) if isinstance(v, int | float) else v for k, v in kept.items()}


def files_of(folder):
    """Returns file names of a run's folder; names of the optimizer's state differ."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    kept = [name for name in found if not any(part in name for part in OPTIMIZER_FILES)]
    return sorted(name for name in kept if "runs/" not in name and "events.out" not in name)


def run(mode, folder, name):
    case = CASES[name]
    torch._dynamo.reset()
    start = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        found["run"] = train(mode, case, folder)
        if case.get("_resume"):
            found["resumed"] = train(mode, case, folder, str(folder / "checkpoint-2"))
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        if os.environ.get("TRACE"):
            raise
    found["seconds"] = round(time.perf_counter() - start, 2)
    return found


def slug(name):
    return "".join(c if c.isalnum() else "-" for c in name)


def main(mode, folder, names):
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.logging.set_verbosity_error()
    for name in names or CASES:
        if name not in CASES:
            continue
        found = run(mode, folder / mode / slug(name), name)
        torch.distributed.barrier()
        found["files"] = files_of(folder / mode / slug(name))
        if os.environ["RANK"] == "0":
            (folder / mode).mkdir(parents=True, exist_ok=True)
            (folder / mode / f"{slug(name)}.json").write_text(json.dumps(found))
            print(name, found.get("error", "")[:150], found["seconds"], file=sys.stderr, flush=True)


# ---- comparing


def difference(one, other):
    """Largest relative difference of two results; None if their structures differ."""
    if type(one) is not type(other):
        return None
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return None
        return worst(difference(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        if len(one) != len(other):
            return None
        return worst(map(difference, one, other))
    if isinstance(one, float):
        if one == other or (one != one and other != other):
            return 0.0
        return abs(one - other) / max(abs(one), abs(other))
    return 0.0 if one == other else None


def worst(found):
    found = list(found)
    return None if None in found else max(found, default=0.0)


def weights_of(folder):
    file = folder / "final" / "model.safetensors"
    return load_file(file) if file.exists() else {}


def compare(folder, name):
    """Returns (verdict, largest difference of logs and metrics, of weights) of a case."""
    theirs, ours = (
        json.loads((folder / mode / f"{slug(name)}.json").read_text())
        for mode in ("ddp", "sharded")
    )
    if "error" in theirs or "error" in ours:
        if theirs.get("error") == ours.get("error"):
            return f"the same error: {ours['error']}", None, None
        return f"DDP {theirs.get('error', 'trains')} | ours {ours.get('error', 'trains')}", 9, 9
    for one in (theirs, ours):
        one.pop("seconds")
    logs = worst([difference(theirs[k], ours[k]) for k in ("run", "resumed") if k in theirs])
    mine, wanted = (weights_of(folder / mode / slug(name)) for mode in ("sharded", "ddp"))
    weights = None
    if mine.keys() == wanted.keys():
        weights = worst(float((mine[k].double() - wanted[k].double()).abs().max()) for k in wanted)
    verdict = "ran"
    if theirs["files"] != ours["files"]:
        odd = set(theirs["files"]) ^ set(ours["files"])
        verdict = f"files differ: {sorted(odd)[:4]}"
    return verdict, logs, weights


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        for case in sys.argv[3:] or CASES:
            verdict, logs, weights = compare(Path(sys.argv[2]), case)
            print(f"{case:50} {logs!s:24.24} {weights!s:24.24} {verdict[:400]}")
    else:
        main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
