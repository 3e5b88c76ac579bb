"""One version, one tag, and files that anybody can make again byte for byte; see docs/release.md."""
