"""Translation of other tools' files: one table of keys per tool.

    rules       the rules of a table: our key, no effect, lost, not supported yet
    keys.yaml   the keys of all tools whose meaning needs no code
    tools       the tables: DeepSpeed, Accelerate, the Trainer and TRL, axolotl, axes of a mesh
    translate   detects the tool of a file and translates it, with a note for every key

Keys are translated, with their places, before files are merged and checked. Errors therefore name
the key and line that the user wrote.
"""
