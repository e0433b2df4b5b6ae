"""What other tools' keys mean here: one table a dialect, and the walk that reads a file by it.

    rules       the words of a table: is ours, has no effect, is lost, is not yet there
    fsdp        the keys of `fsdp_config`, which Accelerate, the Trainer and axolotl share
    accelerate  Accelerate's YAML, FSDP 1 and 2 and DeepSpeed
    deepspeed   DeepSpeed's JSON
    trainer     Hugging Face's TrainingArguments and TRL's script arguments
    axolotl     axolotl's YAML
    translate   finds the dialect of a file and says it in our keys, with a note for every key

A key of a dialect becomes keys of ours, with the place where it stands, before anything is merged
or checked; so its errors name the key and the line that the user wrote.
"""
