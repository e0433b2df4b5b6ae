"""The kinds of training: what each adds to the loop is its data and its loss."""
