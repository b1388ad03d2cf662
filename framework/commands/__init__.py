"""The commands of `repertory`, a module each with `main(arguments) -> exit code`."""
