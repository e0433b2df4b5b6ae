"""The recipe of chat data: next-token loss of the tokens that are learned."""

from __future__ import annotations

from fullshard.recipes.base import RecipeKind
from fullshard.recipes.pretrain.recipe import build

KINDS = {"sft": RecipeKind(build=build, uses_chats=lambda _: True)}
