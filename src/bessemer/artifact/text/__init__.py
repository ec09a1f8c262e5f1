"""The tokenizer file of the standalone runner: a tokenizer's tables and rules in one binary file.

`write_tokenizer_file` makes it from the tokenizer files of an artifact; `format` describes it;
`native/runner` reads it.
"""
