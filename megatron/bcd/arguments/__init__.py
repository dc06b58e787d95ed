"""Command-line flags under Megatron-LM's names, parsed into a RunConfig."""

from megatron.bcd.arguments.parse import parse_run_config, read_command_line
from megatron.bcd.config import run_config_from_dict, run_config_to_dict
from megatron.bcd.config.presets import FAMILY_DEFAULTS
