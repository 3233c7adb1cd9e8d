"""What stands in for a GPU and for Transformer Engine on a machine without them.

Production code never imports this package (import-linter). A worker's life
(`moe_ckpt.loop`), adapters of other loops and the launcher import it, and use it only
where there is no GPU, or where a setting asks for a number format that the CPU lacks.
"""
