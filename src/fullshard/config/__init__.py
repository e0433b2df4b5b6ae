"""What the user asks for: every key, every accepted spelling, and where each value came from.

    values       the words: enums, and every spelling that means one of them
    fields       the kinds of fields: numbers, flags, words, lists of names
    problems     what is wrong with an input, all of it, as one ConfigError
    model        the base of every section: frozen, every key known
    sharding     ShardConfig
    training     TrainingConfig: Hugging Face's names; hf_names: those that mean nothing, or not yet
    moves        keys whose meaning lies under another key (`training.bf16`)
    schema       RunConfig, a whole file, and all sections by name
    supported    the one table of what is in the contract and not built yet
    keys         dotted keys: their names in other tools, and what a bare name means
    origins      where a value came from
    overrides    `key=value` and `--name value` of a command line
    regular      files opened by name: no pipe blocks, no device is endless
    files        a file as values, and as keys with their lines
    dialects/    what other tools' keys mean here, a table each
    load         files + command line -> Resolved (a RunConfig with its origins)
    explain      Resolved -> what became of every key, and the schema for editors
    lint         combinations that are known to be bad
    write        Resolved -> YAML with origins as comments
    environment  the one reader of os.environ
    defaults/    main_job.yaml: what `fullshard train` does without arguments

Nothing here imports torch, jax or numpy, and importing this package runs none of the above.
"""
