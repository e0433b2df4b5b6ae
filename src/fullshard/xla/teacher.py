"""A teacher's arrays on its student's mesh: parted for forwards alone, in a dtype of its own."""

from __future__ import annotations

from fullshard.config.schema import ShardConfig
from fullshard.config.values import DType, Strategy
from fullshard.errors import ConfigError
from fullshard.planner.arrays import ArraysPlan
from fullshard.planner.mesh import Mesh
from fullshard.planner.strategy import row_of
from fullshard.xla.decoder import BLOCKS
from fullshard.xla.plan import Tree, table_of


def teacher_table(
    shapes: Tree, strategy: Strategy, dtype: DType, student: ArraysPlan
) -> ArraysPlan:
    """What a teacher holds; needs no device.

    Args:
        shapes: Shapes of its arrays.
        strategy: no_shard has all of it on every device; the others part it as the student is.
        dtype: That its weights are kept, gathered and computed with in.
        student: The plan whose mesh it shares.

    Raises:
        ConfigError: The strategy wants another mesh than the student's.
    """
    own, theirs = row_of(strategy), row_of(student.strategy)
    alike = theirs.shard_params and own.hybrid == theirs.hybrid
    if own.shard_params and not alike and student.mesh.world_size > 1:
        raise ConfigError(
            f"distill.teacher_strategy: expected no_shard or one like the student's "
            f"({student.strategy}) with backend: jax, whose teacher lies on the student's mesh; "
            f"got {strategy}. Choose such a one, shard the student likewise or use backend: torch."
        )
    mesh = student.mesh if own.shard_params else Mesh(student.mesh.world_size, 1)
    settings = ShardConfig.of(None, strategy=strategy, master_dtype=dtype)
    return table_of(shapes, settings, mesh, BLOCKS, freeze=("*",))
