"""Op libraries that this process has loaded, by the modules that TensorFlow makes of them."""

from __future__ import annotations

import sys
import types

#: TensorFlow's own module `tf.lite` loads it like a library, and every TensorFlow has it.
_OWN = frozenset(("AudioMicrofrontend",))


def loaded_ops() -> set[str]:
    """Return the names of the ops that ``tf.load_op_library`` brought into this process."""
    found = {
        name
        for module in tuple(sys.modules.values())
        if getattr(module, "__dict__", {}).get("_IS_TENSORFLOW_PLUGIN")
        for name, value in vars(module).items()
        if name[:1].isupper() and isinstance(value, types.FunctionType)
    }
    return found - _OWN
