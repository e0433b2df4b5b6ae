"""Translation of other tools' files: one table of keys per tool.

    keys.yaml   the keys of all tools whose meaning needs no code
    accelerate  Accelerate's YAML, and `fsdp_config`, which the Trainer and axolotl share
    deepspeed   DeepSpeed's JSON
    trainer     Hugging Face's TrainingArguments and TRL's script arguments
    axolotl     axolotl's YAML
    translate   detects the tool of a file and translates it, with a note for every key

Keys are translated, with their places, before files are merged and checked. Errors therefore name
the key and line that the user wrote.
"""
