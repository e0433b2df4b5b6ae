"""A rank reads its elements of a parameter that another axis shards: of a range, or of all."""

import json
import os
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fullshard.engine.cuts import Cut
from fullshard.engine.folder import FolderWeights
from fullshard.engine.initial import InitialParam
from fullshard.errors import ConfigError
from fullshard.planner.layout import Slice

WHOLE = torch.arange(8.0 * 6).view(8, 6)
PARTS = {
    "rows": (Shard(0), lambda rank: WHOLE.chunk(2)[rank]),
    "columns": (Shard(1), lambda rank: WHOLE.chunk(2, 1)[rank]),
    "halves of two": (
        _StridedShard(0, split_factor=2),
        lambda rank: torch.cat([half.chunk(2)[rank] for half in WHOLE.chunk(2)]),
    ),
    "everything": (Replicate(), lambda _: WHOLE),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", PARTS)
def test_elements_are_those_of_the_local_tensor(tmp_path, kind, rank):
    save_file({"w": WHOLE}, tmp_path / "model.safetensors")
    placement, local_of = PARTS[kind]
    mesh = DeviceMesh(
        "cpu", torch.arange(2), mesh_dim_names=("tensor",), _init_backend=False, _rank=rank
    )
    local = local_of(rank)
    cut = Cut(mesh, (placement,), (8, 6), (6, 1))
    for start, stop in ((0, local.numel()), (5, 17), (3, 3)):
        piece = Slice("w", tuple(local.shape), start, stop, 0)
        param = InitialParam(piece, cut, cast("Any", None), 0, ("w",))
        wanted = local.reshape(-1)[start:stop]
        param.read(FolderWeights(tmp_path), found := torch.full_like(wanted, torch.nan))
        assert torch.equal(found, wanted)
        assert torch.equal(param.local_of(WHOLE), wanted)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_folder_rewritten_while_it_is_read_is_an_error(tmp_path, parts):
    """A finished run replaces its model while another run may read its weights."""

    def write(value):
        names = ["a", "b"]
        for number in range(parts):
            file = f"part-{number}.safetensors" if parts > 1 else "model.safetensors"
            own = names[number::parts]
            save_file({n: torch.full((8, 6), value) for n in own}, tmp_path / f"{file}.new")
            os.utime(tmp_path / f"{file}.new", (value, value))  # timestamps of files are coarse
            (tmp_path / f"{file}.new").replace(tmp_path / file)
        where = {name: f"part-{names.index(name)}.safetensors" for name in names}
        if parts > 1:
            text = json.dumps({"metadata": {}, "weight_map": where})
            (tmp_path / "model.safetensors.index.json").write_text(text)

    def first(files, name):
        with files.elements([name], (8, 6), 0, 48) as parts:
            return float(parts[0][0])

    write(1.0)
    found = FolderWeights(tmp_path)
    assert first(found, "a") == 1.0
    write(2.0)
    with pytest.raises(ConfigError, match="it was replaced while the folder was read"):
        first(found, "b")
    assert first(FolderWeights(tmp_path), "b") == 2.0
