"""Inputs of Hugging Face architectures: the batch of one rank and step."""

from typing import Any

import torch

from support.models import Batch, generator_of

VOCABULARY = 96


def token_ids(step: int, rank: int, length: int = 9) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=generator_of(step, rank))


def language(step: int, rank: int) -> Batch:
    """Ids as input and as labels; the last labels of every second sequence are masked."""
    ids = token_ids(step, rank)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def unmasked(step: int, rank: int) -> Batch:
    ids = token_ids(step, rank)
    return {"input_ids": ids, "labels": ids}


def translation(step: int, rank: int) -> Batch:
    """The decoder's sequences have a different length."""
    return {**language(step, rank), "labels": token_ids(step + 7, rank, 5)}


def pictures(step: int, rank: int, size: int = 16) -> torch.Tensor:
    shape = (2, 3, size, size)
    return torch.randn(shape, generator=generator_of(step, rank), dtype=torch.float64)


def labelled_pictures(step: int, rank: int) -> Batch:
    labels = torch.randint(0, 5, (2,), generator=generator_of(step, rank))
    return {"pixel_values": pictures(step, rank), "labels": labels}


def large_pictures(step: int, rank: int) -> Batch:
    return {**labelled_pictures(step, rank), "pixel_values": pictures(step, rank, 32)}


def captioned_pictures(step: int, rank: int) -> Batch:
    """Text and images; the loss compares them over the batch."""
    ids = token_ids(step, rank)
    ids[:, -1] = 2  # the end of text, whose hidden state represents the text
    whether: Any = True
    return {"input_ids": ids, "pixel_values": pictures(step, rank), "return_loss": whether}


def speech(step: int, rank: int) -> Batch:
    shape = (2, 8, 16)
    features = torch.randn(shape, generator=generator_of(step, rank), dtype=torch.float64)
    return {"input_features": features, "labels": token_ids(step, rank, 5)}


def sounds(step: int, rank: int) -> Batch:
    generator = generator_of(step, rank)
    values = torch.randn((2, 400), generator=generator, dtype=torch.float64)
    return {"input_values": values, "labels": torch.randint(3, 32, (2, 4), generator=generator)}
