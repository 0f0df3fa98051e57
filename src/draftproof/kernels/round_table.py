"""Define the table that rounds on a device read and write: nine lines of integers, a column for each row.

The host writes a column when a row enters, in order with the rounds; between rounds nobody but the device knows it.
"""

from typing import Final

TARGET, DRAFT, LENGTH, LAST, PREVIOUS, BEHIND, END, MOST, LIMIT = range(9)
"""Lines of the table.

TARGET, DRAFT   first slot in the pool of the target and of the drafter
LENGTH          tokens of the text; the target has read all but the last
LAST, PREVIOUS  its last token, and the one before
BEHIND          tokens at its end that the drafter has not read; for a head that is always the last one
END             the length at which it ends; 0 for an empty row, and after a fault
MOST, LIMIT     the length up to which a draft may reach, and the draft tokens asked for
"""

LINES: Final = 9
