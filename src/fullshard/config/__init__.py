"""What the user asks for: every key, every accepted spelling, and where each value came from.

    values       enums, each member with the spellings of other tools
    fields       kinds of fields: numbers, flags, words, lists of names
    problems     all problems of an input as one ConfigError
    section      the base of every section: frozen, unknown keys are errors
    sharding     ShardConfig
    training     TrainingConfig, with the names of Hugging Face's TrainingArguments
    names        names of Hugging Face's that are no field, or whose meaning is another key
    schema       RunConfig, a whole file, and its other sections
    supported    values that an engine does not support yet, or that are known to be bad
    keys         dotted keys: their names in other tools, and the key that a bare name means
    regular_files  regular files opened by name: no pipe can block, no device is endless
    files        a file as a tree of values, and the origin (file and line) of every key
    dialects/    a table per tool: the meaning of its keys
    load         files + command line (`key=value`, `--name value`) -> Resolved
    explain      Resolved -> YAML with origins as comments, notes of foreign keys; JSON Schemas
    environment  the only reader of os.environ
    host_memory  the memory of this host or container
    defaults/    main_job.yaml: what `fullshard train` does without arguments

Nothing here imports torch, jax or numpy, and importing this package runs none of the above.
"""
