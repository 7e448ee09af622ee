"""What a user can put right: printed as one line, exit code 2."""


class UserError(Exception):
    """Bad input of a command; the message names what was expected and what came."""
