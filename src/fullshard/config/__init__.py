"""The configuration: every key, every accepted spelling, and the origin of each value.

    values       enums, each member with the spellings of other tools; all problems of an input, as
                 one ConfigError
    fields       the base of every section (frozen, unknown keys are errors); types of its fields:
                 numbers, flags, words, lists of names
    rules        rules of a table of keys: our key, no effect, lost, not supported yet; sizes of the
                 axes in the files of all tools, and torchtitan's
    sharding     ShardConfig
    training     TrainingConfig, with the names of Hugging Face's TrainingArguments, also those that
                 are not fields here or that set another key
    schema       RunConfig, a whole file, and its other sections
    supported    values that an engine does not support yet, or that cause trouble (findings.yaml)
    keys         dotted keys: their names in other tools, and the key that a bare name refers to
    regular_files  opens regular files only, never a pipe or device
    files        a file as a tree of values, and the origin (file and line) of every key
    dialects/    a table per tool: the meaning of its keys
    load         files + command line (`key=value`, `--name value`) -> Resolved -> YAML with origins
                 as comments, notes of other tools' keys; JSON Schemas
    environment  the only reader of os.environ
    host_memory  the memory of this host or container
    defaults/    main_job.yaml: the run of `fullshard train` without arguments

Nothing here imports torch, jax or numpy, and importing this package runs none of the above.
"""
