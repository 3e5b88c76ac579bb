__version__: str

_Range = tuple[int, int]

def split_aligned(offset: int, num_bytes: int, alignment: int) -> tuple[_Range, _Range, _Range]: ...
