"""Hashes of weights, which ranks compare."""

from types import SimpleNamespace

import pytest
import torch

from fullshard.engine.norms import SAMPLED, bits_hash, replicas_hash, sample_hash
from fullshard.planner.mesh import Mesh


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 2**11, 2**12, SAMPLED, 2 * SAMPLED, 2**16 + 1])
def test_a_factor_of_two_changes_every_hash(dtype, numel):
    x = torch.full((numel,), 0.75, dtype=dtype)
    mesh = Mesh(2, 1)

    def seen(master):
        group = SimpleNamespace(master=master)
        units = [SimpleNamespace(plan=SimpleNamespace(mesh=mesh), trained_groups=[group])]
        return replicas_hash(units, mesh, 3)

    for hash_of in (bits_hash, sample_hash, seen):
        assert int(hash_of(x)) != int(hash_of(2 * x)), hash_of
        assert int(hash_of(x)) == int(hash_of(x.clone())), hash_of
