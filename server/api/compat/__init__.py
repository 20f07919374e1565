"""Routes under which clients and controllers of other LoRA servers call this one."""
