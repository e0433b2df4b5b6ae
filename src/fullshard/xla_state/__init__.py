"""Checkpoints and Hugging Face folders of XLA arrays, in the format that all engines share.

write    stacked arrays become a tensor a layer; each process writes one range of every tensor
read     each device asks for its box; only the bytes of the box are read
states   an optimizer's state by the names of parameters, as torch names it; other leaves whole
"""
