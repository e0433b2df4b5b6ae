"""The kinds of training. Each adds its data and its loss to the loop."""
