def give_back_pages(fd: int, nbytes: int) -> None: ...

class Mapping:
    nbytes: int
    def __new__(
        cls,
        fd: int,
        nbytes: int,
        *,
        inherit: bool = True,
        populate: bool = False,
        writable: bool = True,
        private: bool = False,
    ) -> Mapping: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def handle(self) -> int: ...
