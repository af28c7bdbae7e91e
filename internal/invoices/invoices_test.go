package invoices_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/invoices"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

func TestFullNumber(t *testing.T) {
	t.Parallel()

	require.Equal(t, "INV-2026-000042", invoices.Invoice{Year: 2026, Number: 42}.FullNumber())
	require.Equal(t, "INV-2026-1000000", invoices.Invoice{Year: 2026, Number: 1_000_000}.FullNumber(), "never cut")
	require.Equal(t, "CN-2026-000007", invoices.CreditNote{Year: 2026, Number: 7}.FullNumber())
}

func TestCreditTx(t *testing.T) {
	t.Parallel()

	t.Run("WritesWhatCanBeReadBack", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		issued, err := w.issue(t.Context(), at, w.drafts(t, w.tenant, 1)...)
		require.NoError(t, err)

		credited, err := w.credit(t.Context(), at, creditNote(issued[0], 1), creditNote(issued[0], 2))
		require.NoError(t, err)
		require.Equal(t, "CN-2026-000001", credited[0].FullNumber())
		require.Equal(t, "CN-2026-000002", credited[1].FullNumber())
		w.read(t, func(tx pgx.Tx) {
			got, err := invoices.CreditNotesByOrderTx(t.Context(), tx, w.tenant, issued[0].OrderID)
			require.NoError(t, err)
			require.Equal(t, credited, got)

			found, err := invoices.FindTx(t.Context(), tx, []invoices.OrderKey{
				{TenantID: w.tenant, OrderID: issued[0].OrderID},
				{TenantID: w.other, OrderID: issued[0].OrderID},
				{TenantID: w.tenant, OrderID: newID()},
			})
			require.NoError(t, err)
			require.Len(t, found, 1, "another tenant's and an unknown order are not found")
			for _, invoice := range found {
				require.Equal(t, issued[0].ID, invoice.ID)
				require.Equal(t, 2, invoice.CreditNotes)
			}
		})
	})

	t.Run("RefusesWhatTheDatabaseKnowsToBeWrong", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		issued, err := w.issue(t.Context(), at, w.drafts(t, w.tenant, 2)...)
		require.NoError(t, err)
		first := creditNote(issued[0], 1)
		_, err = w.credit(t.Context(), at, first)
		require.NoError(t, err)

		for name, test := range map[string]struct {
			spoil            func(note *invoices.CreditNote)
			code, constraint string
		}{
			"TheSameRefundTwice": {func(n *invoices.CreditNote) { n.RefundID = first.RefundID }, "23505", "credit_notes_refund_key"},
			"AnOrdinalTwice":     {func(n *invoices.CreditNote) { n.OrderID, n.Ordinal = first.OrderID, 1 }, "23505", "credit_notes_ordinal_key"},
			"NoSuchInvoice":      {func(n *invoices.CreditNote) { n.InvoiceID = newID() }, "23503", "credit_notes_invoice_fkey"},
			"AnInvoiceOfAnother": {func(n *invoices.CreditNote) { n.TenantID = w.other }, "23503", "credit_notes_invoice_fkey"},
			"SumsThatDisagree":   {func(n *invoices.CreditNote) { n.NetAmount++ }, "23514", "credit_notes_amounts_sum"},
			"NothingGivenBack":   {func(n *invoices.CreditNote) { n.NetAmount, n.TaxAmount, n.TotalAmount = 0, 0, 0 }, "23514", "credit_notes_amounts_sum"},
			"ANegativeTaxInATotal": {
				func(n *invoices.CreditNote) { n.NetAmount, n.TaxAmount = 501, -1 }, "23514", "credit_notes_amounts_sum",
			},
		} {
			t.Run(name, func(t *testing.T) {
				note := creditNote(issued[1], 1)
				test.spoil(&note)
				_, err := w.credit(t.Context(), at, note)
				requireRefused(t, err, test.code, test.constraint)
			})
		}
		require.Equal(t, []int64{1}, pgtest.Column[int64](t, w.owner, "SELECT last_number FROM document_numbers WHERE kind = 'credit-note'"))
	})
}

func TestRead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	issued, err := w.issue(t.Context(), at, w.drafts(t, w.tenant, 1)...)
	require.NoError(t, err)

	w.read(t, func(tx pgx.Tx) {
		_, err := invoices.GetTx(t.Context(), tx, w.tenant, newID())
		require.ErrorIs(t, err, invoices.ErrNotFound)
		_, err = invoices.GetByOrderTx(t.Context(), tx, w.tenant, newID())
		require.ErrorIs(t, err, invoices.ErrNotFound)

		_, err = invoices.GetTx(t.Context(), tx, w.other, issued[0].ID)
		require.ErrorIs(t, err, invoices.ErrNotFound, "another tenant's")
		_, err = invoices.GetByOrderTx(t.Context(), tx, w.other, issued[0].OrderID)
		require.ErrorIs(t, err, invoices.ErrNotFound, "another tenant's")
		notes, err := invoices.CreditNotesByOrderTx(t.Context(), tx, w.tenant, issued[0].OrderID)
		require.NoError(t, err)
		require.Empty(t, notes)
	})
}

// TestDocumentsAreNeverChanged tries to, as every role that the services use.
func TestDocumentsAreNeverChanged(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	issued, err := w.issue(t.Context(), at, w.drafts(t, w.tenant, 1)...)
	require.NoError(t, err)
	_, err = w.credit(t.Context(), at, creditNote(issued[0], 1))
	require.NoError(t, err)

	for _, role := range []string{"api", "relay", "worker", "janitor", "verify"} {
		pool := w.db.Pool(t, role)
		for _, table := range []string{"invoices", "invoice_lines", "credit_notes"} {
			for _, statement := range []string{
				"UPDATE " + table + " SET net_minor = 0",
				"DELETE FROM " + table,
				"TRUNCATE " + table + " CASCADE",
			} {
				_, err := pool.Exec(t.Context(), statement)
				require.Equal(t, "42501", postgres.Code(err), "%s: %s: %v", role, statement, err)
			}
		}
		for _, statement := range []string{
			"DELETE FROM document_numbers",
			"UPDATE document_numbers SET year = 2020",
			"UPDATE order_billing SET order_id = gen_random_uuid()",
			"DELETE FROM order_billing",
		} {
			_, err := pool.Exec(t.Context(), statement)
			require.Equal(t, "42501", postgres.Code(err), "%s: %s: %v", role, statement, err)
		}
	}
}
