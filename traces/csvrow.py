"""CSV as the public traces use it: one record a physical line, columns found by name."""

import csv

from traces.errors import RowError


def split_fields(text: str) -> list[str]:
    """The fields of one line; a quoted field may hold commas, never a line end. Raises RowError."""
    if '"' not in text:
        return text.split(",")
    if text.count('"') % 2:
        raise RowError("line", "unterminated quoted field")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise RowError("line", f"not CSV: {error}") from error


class Columns:
    """Positions of the columns that a format needs, learnt from the header line."""

    def __init__(self, wanted: tuple[str, ...], header: str) -> None:
        names = split_fields(header)
        for name in wanted:
            if names.count(name) > 1:
                raise RowError(name, f"column {name} twice")
        missing = [name for name in wanted if name not in names]
        if missing:
            raise RowError(missing[0], _missing_reason(missing, names, header))
        self.extra = [name for name in names if name not in wanted]
        self._header = names
        self._positions = [names.index(name) for name in wanted]

    def pick(self, text: str) -> list[str]:
        """The wanted fields of one data line, in the order in which they were asked for; raises RowError."""
        fields = split_fields(text)
        if len(fields) != len(self._header):
            raise RowError("line", f"{len(self._header)} fields expected, found {len(fields)}")
        if fields == self._header:
            raise RowError("line", "header repeated inside the data (files joined?)")
        return [fields[position] for position in self._positions]


def _missing_reason(missing: list[str], names: list[str], header: str) -> str:
    if header[:1].isdigit():
        return "header expected on line 1, found data"
    if len(names) == 1 and ";" in header:
        return f"missing columns {', '.join(missing)}; the file looks semicolon separated, commas expected"
    unknown = f", found {', '.join(names)[:200]}"
    return f"missing column{'s' if len(missing) > 1 else ''} {', '.join(missing)}{unknown}"
