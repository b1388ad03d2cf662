"""The commands of `repertory`: one module each, with `main(arguments) -> exit code`."""
