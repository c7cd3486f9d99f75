"""A bad value in the dictionary of a column costs the rows that use it, or the batch of Arrow is refused."""

from decimal import Decimal

import pyarrow as pa
import pytest

from vantage.tasks.data.arrow_rows import rows_of_batch
from vantage.tasks.data.row_faults import Fault


@pytest.mark.parametrize("index", [pa.int8(), pa.uint16(), pa.int64()])
@pytest.mark.parametrize("text", [pa.string(), pa.large_string()])
def test_a_bad_value_of_a_dictionary_costs_the_rows_that_use_it(
    index: pa.DataType, text: pa.DataType
) -> None:
    """Arrow validates the dictionary of every slice as a whole, and found the bad value for each row."""
    as_bytes = pa.binary() if text == pa.string() else pa.large_binary()
    words = pa.array([b"good", b"b\xffd", b"fine", b"\xfe unused"], as_bytes).view(text)
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, None, 0, 1], index), words)
    batch = pa.record_batch({"prompt": column, "number": list(range(6))})
    rows = list(rows_of_batch(batch))
    assert [each for each in rows if not isinstance(each, Fault)] == [
        {"prompt": "good", "number": 0},
        {"prompt": "fine", "number": 2},
        {"prompt": None, "number": 3},
        {"prompt": "good", "number": 4},
    ]
    assert [each.shown for each in rows if isinstance(each, Fault)] == [
        "In column 0: Invalid: Invalid UTF8 sequence at string index 0"
    ] * 2
    assert [isinstance(each, Fault) for each in rows_of_batch(batch.slice(1, 2))] == [True, False]


def test_a_bad_number_of_a_dictionary_costs_the_rows_that_use_it() -> None:
    """The number has more digits than its type allows."""
    numbers = pa.array([Decimal(1), Decimal(12345), Decimal(2)], pa.decimal128(9)).view(pa.decimal128(2))
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int8()), numbers)
    rows = list(rows_of_batch(pa.record_batch({"number": column})))
    assert [isinstance(each, Fault) for each in rows] == [False, True, False]
    assert rows[2] == {"number": Decimal(2)}


@pytest.mark.parametrize("index", [113, -1])
def test_an_index_beyond_a_dictionary_with_a_bad_value_refuses_the_batch(index: int) -> None:
    words = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, index], pa.int32()), words, safe=False)
    with pytest.raises(pa.ArrowException):
        list(rows_of_batch(pa.record_batch({"prompt": column})))


def test_a_wrong_offset_of_a_dictionary_with_a_bad_value_refuses_the_batch() -> None:
    """The bad value must not hide that another one lies behind the column's bytes, also where no row uses that one."""
    offsets = pa.array([0, 1, 900, 3], pa.int32()).buffers()[1]
    words = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"\xffbc")])
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0, 0], pa.int32()), words, safe=False)
    with pytest.raises(pa.ArrowException):
        list(rows_of_batch(pa.record_batch({"prompt": column})))
