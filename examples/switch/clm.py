"""Trains a language model with transformers' Trainer: torchrun --nproc-per-node 2 clm.py FOLDER."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def main():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=128, num_attention_heads=2, num_key_value_heads=2, **sizes)
    model = LlamaForCausalLM(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(128, (64, 16)).tolist()]
    args = TrainingArguments(
        sys.argv[1], use_cpu=True, max_steps=4, logging_steps=1, save_steps=2, report_to="none"
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:16])
    trainer.train()
    trainer.save_model(sys.argv[1])
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    trainer.accelerator.print("losses", *losses, trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    main()
