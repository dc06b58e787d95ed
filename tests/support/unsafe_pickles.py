"""Pickles that try to be more than data, and what the refusal of each has to name.

They lack the last opcode, and the protocol where it is 4; MARKER stands for a file that must not appear.
"""

from __future__ import annotations

import pickle
import struct


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


CALL = b"(" + text("touch MARKER") + b"tR"  # calls what lies on the stack
METADATA = named("torch.distributed.checkpoint.metadata", "Metadata")
WRITE_ITEM_TYPE = named("torch.distributed.checkpoint.planner", "WriteItemType")
MADE = METADATA + b")\x81"  # an empty Metadata
SET_STATE = b"N}" + text("__setstate__") + METADATA + b"s\x86b"  # sets an attribute of what lies on the stack

TRICKS: dict[str, tuple[bytes, str]] = {
    "global": (b"cposix\nsystem\n" + CALL, "posix.system"),
    "stack_global": (named("posix", "system") + CALL, "posix.system"),
    "os": (named("os", "system") + CALL, "os.system"),
    "inst": (b"(" + text("touch MARKER") + b"iposix\nsystem\n", "Unsupported operand 105"),
    "obj": (b"(cposix\nsystem\n" + text("touch MARKER") + b"o", "posix.system"),
    "obj_of_an_allowed_class": (b"(" + METADATA + text("x") + b"o", "Unsupported operand 111"),
    "python2_name": (b"\x80\x02c__builtin__\neval\n" + CALL, "eval is refused"),
    "builtins": (named("builtins", "exec") + CALL, "exec is refused"),
    "getattr": (named("builtins", "getattr") + CALL, "getattr is refused"),
    "partial": (named("functools", "partial") + CALL, "functools.partial"),
    "torch_load": (named("torch", "load") + CALL, "torch.load"),
    "dotted": (named("torch", "serialization.load") + CALL, "torch.serialization.load"),
    "dotted_module": (named("torch.distributed.checkpoint.filesystem", "os.system") + CALL, "filesystem.os.system"),
    "dotted_method": (named("torch.distributed.checkpoint.metadata", "Metadata.__init__") + CALL, "Metadata.__init__"),
    "dotted_class": (named("torch.distributed.checkpoint", "metadata.Metadata") + CALL, "Metadata without its tables"),
    "split_elsewhere": (named("torch.distributed", "checkpoint.metadata.Metadata"), "a type in place of Metadata"),
    "other_class_of_module": (named("torch.distributed.checkpoint.planner", "LoadPlan"), "planner.LoadPlan"),
    "name_of_module": (named("torch.distributed.checkpoint.metadata", "os") + CALL, "metadata.os"),
    "extension": (b"\x82\xf0" + CALL, "Unsupported operand 130"),
    "persistent": (b"Pposix.system\n", "Unsupported operand 80"),
    "new_with_arguments": (METADATA + b"(" + text("x") + b"t\x81", "Metadata without its tables"),
    "new_of_a_function": (WRITE_ITEM_TYPE + b")\x81", "function.__new__"),
    "new_with_keywords": (METADATA + b")}\x92", "Unsupported operand 146"),
    "call_of_a_class": (METADATA + CALL, "Metadata without its tables"),
    "call_of_text": (text("posix.system") + CALL, "Trying to call reduce for unrecognized function"),
    "set_state_of_a_class": (METADATA + SET_STATE, "Can only build"),
    "set_state_of_an_enumeration": (WRITE_ITEM_TYPE + SET_STATE, "Can only build"),
    "set_state_of_a_value": (
        WRITE_ITEM_TYPE + b"K\x02\x85R}" + text("_value_") + b"K\x07sb",
        "Can only build",
    ),
    "set_state_of_a_function": (named("torch.serialization", "_get_layout") + SET_STATE, "Can only build"),
    "slots": (MADE + SET_STATE, "Metadata without its tables"),
    "append_to_a_class": (METADATA + text("x") + b"a", "Can only append to lists"),
    "item_of_a_class": (WRITE_ITEM_TYPE + text("x") + text("y") + b"s", "Can only SETITEM for dict"),
    "items_of_an_object": (MADE + b"(" + text("x") + text("y") + b"u", "Can only SETITEMS for dict"),
    "values_of_an_object": (MADE + b"(" + text("x") + b"e", "Can only extend lists"),
    "something_else": (b"}", "a dict in place of Metadata"),
    "no_tables": (MADE, "Metadata without its tables"),
    "long_name": (named("x" * 10**4, "\x1b[2J\ny"), "x" * 100 + " is refused"),
    "terminal": (named("x", "\x1b[2J\ny"), "x.\\x1b[2J is refused"),
}
