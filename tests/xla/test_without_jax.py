"""Without jax everything else works, and features that need it name the package to install."""

from support.processes import python

PROGRAM = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "jax" else found(name, *rest)
import fullshard
from fullshard.errors import ConfigError
try:
    import fullshard.jax
except ConfigError as error:
    print(error)
"""


def test_importing_the_jax_side_without_jax_names_the_extra():
    assert python("-c", PROGRAM).stdout == (
        "backend: jax needs jax, which is not installed. Run pip install 'fullshard[jax]'.\n"
    )
