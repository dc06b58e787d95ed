"""Pickles that try to run code.

They lack the last opcode, and the protocol opcode if it is 4. MARKER stands for a file that must not appear.
"""

from __future__ import annotations

import pickle
import struct


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


CALL = b"(" + text("touch MARKER") + b"tR"  # calls the function on the stack
METADATA = named("torch.distributed.checkpoint.metadata", "Metadata")

TRICKS: dict[str, bytes] = {
    "global": b"cposix\nsystem\n" + CALL,
    "stack_global": named("posix", "system") + CALL,
    "inst": b"(" + text("touch MARKER") + b"iposix\nsystem\n",
    "obj": b"(cposix\nsystem\n" + text("touch MARKER") + b"o",
    "python2_name": b"\x80\x02c__builtin__\neval\n" + CALL,
    "builtins": named("builtins", "exec") + CALL,
    "getattr": named("builtins", "getattr") + CALL,
    "torch_load": named("torch", "load") + CALL,
    "dotted": named("torch", "serialization.load") + CALL,
    "dotted_module": named("torch.distributed.checkpoint.filesystem", "os.system") + CALL,
    "dotted_method": named("torch.distributed.checkpoint.metadata", "Metadata.__init__") + CALL,
    "name_of_module": named("torch.distributed.checkpoint.metadata", "os") + CALL,
    "persistent": b"Pposix.system\n",
    "call_of_text": text("posix.system") + CALL,
    "set_state_of_a_class": METADATA + b"N}" + text("x") + named("posix", "system") + b"s\x86b",
    "something_else": b"}",
}
