"""A user's script with a trainer: `python trainer_job.py plain|sharded FOLDER`.

It writes its results to FOLDER/results.json.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForCausalLM, TrainingArguments

from support.trainers import llama_config, word_tokenizer

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])
NUM_RANKS = 1 if MODE == "plain" else 2
SEEN = ("loss", "eval_loss", "grad_norm", "mean_token_accuracy")


def trainer_classes():
    if MODE == "plain":
        return transformers.Trainer, trl.SFTTrainer
    from fullshard.integrations.transformers import SFTTrainer, Trainer

    return Trainer, SFTTrainer


TRAINER, SFT_TRAINER = trainer_classes()


def model(dtype=torch.float64):
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(64)).to(dtype)


def settings(kind, name, **more):
    """A global batch of 16 in two micro-batches, for any number of ranks."""
    return kind(
        output_dir=str(FOLDER / name), use_cpu=True, dataloader_pin_memory=False,
        per_device_train_batch_size=8 // NUM_RANKS, per_device_eval_batch_size=8 // NUM_RANKS,
        gradient_accumulation_steps=2, max_steps=6, save_steps=3, save_total_limit=2,
        learning_rate=1e-2, logging_steps=1, max_grad_norm=0.3, seed=3, report_to=[],
        disable_tqdm=True, **more,
    )  # fmt: skip


def history(trainer):
    return [
        {"step": row["step"], **{key: row[key] for key in SEEN if key in row}}
        for row in trainer.state.log_history
        if not row.keys().isdisjoint(SEEN)
    ]


def pretrain(resume=None):
    """Ragged labels, so that a mean of means would be wrong."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(3, 64, (16,), generator=generator).tolist() for _ in range(64)]
    rows = [
        {"input_ids": row, "labels": [-100] * (at % 7) + row[at % 7 :]}
        for at, row in enumerate(tokens)
    ]
    arguments = settings(TrainingArguments, "trainer", eval_strategy="steps", eval_steps=3)
    trainer = TRAINER(model=model(), args=arguments, train_dataset=rows, eval_dataset=rows[:16])
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(FOLDER / "trainer" / "final"))
    return {"history": history(trainer), "parameters": trainer.get_num_trainable_parameters()}


def finetune():
    rows = [
        {
            "prompt": f"w{at % 50} w{at % 7}",
            "completion": " ".join(f" w{at * i % 60}" for i in range(1, 4 + at % 9)),
        }
        for at in range(64)
    ]
    arguments = settings(
        trl.SFTConfig, "sft", max_length=32, gradient_checkpointing=True, bf16=False
    )
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = SFT_TRAINER(
        model=model(torch.float32), args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=word_tokenizer(64), peft_config=adapter,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(FOLDER / "sft" / "final"))
    strategy = getattr(trainer.accelerator, "sharding", None)
    return {"history": history(trainer), "strategy": strategy and strategy.strategy}


def main():
    whole = pretrain()
    results = {"trainer": whole, "sft": finetune()}
    if MODE != "plain":
        results["resumed"] = pretrain(str(FOLDER / "trainer" / "checkpoint-3"))
        results["switched"] = pretrain(str(FOLDER.parent / "plain" / "trainer" / "checkpoint-3"))
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    (FOLDER / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
