// Its target owns the precompiled header of the tests (CisternTests.cmake).
int main() { return 0; }
