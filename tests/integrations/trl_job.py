"""TRL's trainers, tied and untied, with and without LoRA: python trl_job.py ddp|sharded FOLDER."""

import json
import os
import sys
from pathlib import Path

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForCausalLM
from trl.experimental.gkd import GKDConfig, GKDTrainer

from support.trainers import llama_config, word_tokenizer

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])
NUM_WORDS = 600  # large enough that an untied head is larger than a block
SEEN = ("loss", "grad_norm", "entropy", "rewards/margins", "reward", "kl")


def trainer_of(kind):
    if MODE == "ddp":
        return kind
    from fullshard.integrations.transformers import sharded

    return sharded(kind)


def tokenizer():
    found = word_tokenizer(NUM_WORDS)
    found.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return found


def model(*, tied, seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(NUM_WORDS, tie_word_embeddings=tied))


def words(at, most=9):
    return " ".join(f"w{at * i % 590}" for i in range(1, 4 + at % most))


def rows(kind):
    for at in range(32):
        prompt = f"w{at % 50} w{at % 7}"
        if kind == "sft":
            yield {"prompt": prompt, "completion": " " + words(at)}
        elif kind == "dpo":
            yield {"prompt": prompt, "chosen": " " + words(at), "rejected": " " + words(at, 5)}
        elif kind == "gkd":
            said = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": words(at)},
            ]
            yield {"messages": said}
        else:
            yield {"prompt": prompt}


def reward(completions, **_):
    """A reward that differs between the answers to one prompt."""
    return [float(sum(int(word[1:]) % 7 for word in said.split() if word[1:].isdigit()))
            for said in completions]  # fmt: skip


def train(kind, *, tied, adapter):
    name = f"{kind}-{'tied' if tied else 'untied'}-{'lora' if adapter else 'full'}"
    common = {
        "output_dir": str(FOLDER / MODE / name), "use_cpu": True, "dataloader_pin_memory": False,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2,
        "save_strategy": "no", "learning_rate": 1e-2, "logging_steps": 1, "max_grad_norm": 0.3,
        "seed": 3, "report_to": [], "disable_tqdm": True, "bf16": False,
    }  # fmt: skip
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    given = {
        "model": model(tied=tied), "processing_class": tokenizer(),
        "train_dataset": Dataset.from_list(list(rows(kind))),
        "peft_config": lora if adapter else None,
    }  # fmt: skip
    if kind == "sft":
        trainer = trainer_of(trl.SFTTrainer)(args=trl.SFTConfig(**common, max_length=32), **given)
    elif kind == "dpo":
        reference = None if adapter else model(tied=tied, seed=1)
        settings = trl.DPOConfig(**common, max_length=32)
        trainer = trainer_of(trl.DPOTrainer)(args=settings, ref_model=reference, **given)
    elif kind == "gkd":
        settings = GKDConfig(**common, max_length=32, max_new_tokens=6, lmbda=0.5, temperature=1.0)
        teacher = model(tied=tied, seed=1)
        trainer = trainer_of(GKDTrainer)(args=settings, teacher_model=teacher, **given)
    else:
        settings = trl.RLOOConfig(**common, num_generations=2, max_completion_length=8, beta=0.1)
        trainer = trainer_of(trl.RLOOTrainer)(args=settings, reward_funcs=reward, **given)
    torch.manual_seed(7)
    trainer.train()
    history = trainer.state.log_history
    return name, [{k: row[k] for k in SEEN if k in row} for row in history if "loss" in row]


def main():
    torch.set_num_threads(1)
    wanted = [(kind, tied, lora) for kind in ("sft", "dpo", "gkd") for tied in (False, True)
              for lora in (False, True)]  # fmt: skip
    wanted.append(("rloo", False, True))
    results = dict(train(kind, tied=tied, adapter=lora) for kind, tied, lora in wanted)
    if os.environ["RANK"] == "0":
        (FOLDER / f"{MODE}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
