DROP TABLE ledger_lines;
DROP TABLE ledger_entries;
DROP TABLE ledger_accounts;
DROP FUNCTION ledger_entries_check_lines();
DROP FUNCTION ledger_entries_check_tx_id();
DROP FUNCTION ledger_lines_check_entry();
DROP FUNCTION ledger_refuse_change();
