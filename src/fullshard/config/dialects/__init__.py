"""The meaning of other tools' keys: a table per tool, and the translation of a file by it.

    rules       the rules of a table: a key of ours, no effect, lost, not supported yet
    accelerate  Accelerate's YAML, and `fsdp_config`, which the Trainer and axolotl have too
    deepspeed   DeepSpeed's JSON
    trainer     Hugging Face's TrainingArguments and TRL's script arguments
    axolotl     axolotl's YAML
    translate   finds the tool of a file and translates it, with a note for every key

A foreign key becomes keys of ours, with its place, before anything is merged or checked. Errors
therefore name the key and the line that the user wrote.
"""
