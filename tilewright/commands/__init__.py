"""The subcommands of `tilewright`, one module each."""
