"""The error of a run that cannot go on, for reasons that a person has to look at."""


class RunError(RuntimeError):
    """A run failed while it worked: a loss that is not finite, an unreadable file.

    Its message is written for the user and says what to do. A config that cannot work
    is a ValueError instead, before any work.

    Attributes:
      what: what happened, in a few words for a table.
    """

    def __init__(self, what: str, advice: str = ""):
        super().__init__(f"{what}; {advice}" if advice else what)
        self.what = what
