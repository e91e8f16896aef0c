"""The tuning database: tables, migrations, queries, transfer as JSON lines."""
