"""The tuning database: `Store` over SQLite, PostgreSQL or any other SQLAlchemy URL.

Importing this package imports SQLAlchemy; `import tilewright` and a warm dispatch never do.
"""

from tilewright.runtime.store.database import Store

__all__ = ["Store"]
