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
    "inst": (b"(" + text("touch MARKER") + b"iposix\nsystem\n", "posix.system"),
    "obj": (b"(cposix\nsystem\n" + text("touch MARKER") + b"o", "posix.system"),
    "obj_of_an_allowed_class": (b"(" + METADATA + text("x") + b"o", "the opcode 111 of a pickle"),
    "python2_name": (b"\x80\x02c__builtin__\neval\n" + CALL, "__builtin__.eval"),
    "builtins": (named("builtins", "exec") + CALL, "builtins.exec"),
    "getattr": (named("builtins", "getattr") + CALL, "builtins.getattr"),
    "partial": (named("functools", "partial") + CALL, "functools.partial"),
    "torch_load": (named("torch", "load") + CALL, "torch.load"),
    "dotted": (named("torch", "serialization.load") + CALL, "torch.serialization.load"),
    "dotted_module": (named("torch.distributed.checkpoint.filesystem", "os.system") + CALL, "filesystem.os.system"),
    "dotted_method": (named("torch.distributed.checkpoint.metadata", "Metadata.__init__") + CALL, "Metadata.__init__"),
    "dotted_class": (named("torch.distributed.checkpoint", "metadata.Metadata") + CALL, "metadata.Metadata"),
    "split_elsewhere": (named("torch.distributed", "checkpoint.metadata.Metadata"), "checkpoint.metadata.Metadata"),
    "other_class_of_module": (named("torch.distributed.checkpoint.planner", "LoadPlan"), "planner.LoadPlan"),
    "name_of_module": (named("torch.distributed.checkpoint.metadata", "os") + CALL, "metadata.os"),
    "extension": (b"\x82\xf0" + CALL, "the opcode 130 of a pickle"),
    "persistent": (b"Pposix.system\n", "the opcode 80 of a pickle"),
    "new_with_arguments": (METADATA + b"(" + text("x") + b"t\x81", "a new object of the class Metadata"),
    "new_of_a_function": (WRITE_ITEM_TYPE + b")\x81", "a new object of the class WriteItemType"),
    "new_with_keywords": (METADATA + b")}\x92", "the opcode 146 of a pickle"),
    "call_of_a_class": (METADATA + CALL, "a call of the class Metadata"),
    "call_of_text": (text("posix.system") + CALL, "a call of a str"),
    "set_state_of_a_class": (METADATA + SET_STATE, "a change of the class Metadata"),
    "set_state_of_an_enumeration": (WRITE_ITEM_TYPE + SET_STATE, "a change of the class WriteItemType"),
    "set_state_of_a_value": (
        WRITE_ITEM_TYPE + b"K\x02\x85R}" + text("_value_") + b"K\x07sb",
        "a change of a WriteItemType",
    ),
    "set_state_of_a_function": (named("torch.serialization", "_get_layout") + SET_STATE, "a change of a function"),
    "slots": (MADE + SET_STATE, "a change of a Metadata"),
    "append_to_a_class": (METADATA + text("x") + b"a", "a change of the class Metadata"),
    "item_of_a_class": (WRITE_ITEM_TYPE + text("x") + text("y") + b"s", "a change of the class WriteItemType"),
    "items_of_an_object": (MADE + b"(" + text("x") + text("y") + b"u", "a change of a Metadata"),
    "values_of_an_object": (MADE + b"(" + text("x") + b"e", "a change of a Metadata"),
    "something_else": (b"}", "a dict in place of Metadata"),
    "no_tables": (MADE, "Metadata without its tables"),
    "long_name": (named("x" * 10**4, "\x1b[2J\ny"), "x" * 100 + " is refused"),
    "terminal": (named("x", "\x1b[2J\ny"), "x.\\x1b[2J\\ny is refused"),
}
