package verify_test

import (
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/verify"
)

var update = flag.Bool("update", false, "write the golden files")

func noWait(config *verify.Config) { config.Wait = 0 }

// books are right: an order of each sort, everything delivered.
type books struct {
	created, cancelled, paid, refunded uuid.UUID
	refund                             uuid.UUID
}

func rightBooks(t *testing.T, w *world) books {
	t.Helper()
	b := books{created: w.placeEUR(t), cancelled: w.placeEUR(t), paid: w.placeEUR(t)}
	b.refunded = w.place(t, "EUR", line(1, 999, 190000), line(3, 333, 70000), line(1, 5, 0))
	w.cancel(t, b.cancelled)
	w.pay(t, b.paid)
	w.pay(t, b.refunded)
	b.refund = w.refund(t, b.refunded, 700)
	w.refund(t, b.refunded, 1)
	w.deliver(t)
	return b
}

func TestRunRightBooks(t *testing.T) {
	t.Parallel()

	t.Run("EmptyOnesPassAndSaySo", func(t *testing.T) {
		t.Parallel()

		report := newWorld(t).verify(t)
		require.True(t, report.OK)
		golden(t, "empty", report)
	})

	t.Run("EverySortOfOrderPasses", func(t *testing.T) {
		t.Parallel()

		w := newWorld(t)
		b := rightBooks(t, w)
		yen := w.place(t, "JPY", line(3, 333, 100000))
		dinar := w.place(t, "KWD", line(1, 1005, 50000), line(1, 1, 1000000))
		w.pay(t, yen)
		w.pay(t, dinar)
		w.refund(t, dinar, 1057) // all of it
		w.refund(t, b.paid, 2975)
		w.deliver(t)

		report := w.verify(t)
		require.Empty(t, report.Findings)
		golden(t, "right", report)
	})

	t.Run("TenantsAreKeptApart", func(t *testing.T) {
		t.Parallel()

		w := newWorld(t)
		rightBooks(t, w)
		w.tenant = w.newTenant(t, "second")
		rightBooks(t, w)

		report := w.verify(t)
		require.Empty(t, report.Findings)
		require.EqualValues(t, 4, report.Invoices)
		require.Len(t, report.TrialBalance, 3)
	})

	t.Run("EventsMayHaveLeftTheOutboxByAge", func(t *testing.T) {
		t.Parallel()

		w := newWorld(t)
		b := rightBooks(t, w)
		w.spoil(t, "UPDATE orders SET created_at = created_at - interval '9 days', updated_at = updated_at - interval '9 days'")
		w.spoil(t, "UPDATE payments SET paid_at = paid_at - interval '9 days'")
		w.spoil(t, "UPDATE invoices SET issued_at = issued_at - interval '9 days'")
		w.spoil(t, "DELETE FROM outbox_events WHERE event_type <> 'OrderRefunded' AND event_type <> 'CreditNoteIssued'")
		require.Empty(t, w.verify(t).Findings)

		w.spoil(t, "UPDATE payments SET paid_at = now() WHERE order_id = $1", b.paid)
		requireFound(t, w.verify(t), verify.MissingEvent, b.paid, uuid.Nil)
	})

	t.Run("EverythingIsSeenByTheRoleOrNothing", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		_, err := verify.Run(t.Context(), verify.Config{DB: database.Pool(t, "api")})
		require.ErrorContains(t, err, "use onceledger_verify")
	})
}

// Each kind of violation is made by hand, with triggers and foreign keys off,
// in books that are right otherwise. It must be found, and named.
func TestRunFinds(t *testing.T) {
	t.Parallel()

	type spoilt struct {
		order, event uuid.UUID // to be named; the zero id stands for any
	}
	tests := []struct {
		name  string
		kind  verify.Kind
		spoil func(t *testing.T, w *world, b books) spoilt
	}{
		{"PaymentWithoutEffects", verify.Lost, func(t *testing.T, w *world, b books) spoilt {
			paid := w.event(t, b.paid, event.OrderPaid)
			w.spoil(t, "DELETE FROM ledger_lines WHERE event_id = $1", paid)
			w.spoil(t, "DELETE FROM ledger_entries WHERE event_id = $1", paid)
			w.spoil(t, "DELETE FROM invoice_lines WHERE invoice_id = $1", paid)
			w.spoil(t, "DELETE FROM invoices WHERE id = $1", paid)
			w.spoil(t, "DELETE FROM outbox_events WHERE event_type = 'InvoiceIssued' AND aggregate_id = $1", b.paid)
			return spoilt{b.paid, paid}
		}},
		{"PaymentThatTheConsumerPassedBy", verify.Lost, func(t *testing.T, w *world, _ books) spoilt {
			order := w.placeEUR(t)
			w.deliver(t)
			w.pay(t, order)
			return spoilt{order, w.event(t, order, event.OrderPaid)}
		}},
		{"CancellationThatTheConsumerPassedBy", verify.Lost, func(t *testing.T, w *world, b books) spoilt {
			w.cancel(t, b.created)
			return spoilt{b.created, w.event(t, b.created, event.OrderCancelled)}
		}},
		{"PaymentWithoutEntry", verify.Lost, func(t *testing.T, w *world, b books) spoilt {
			paid := w.event(t, b.paid, event.OrderPaid)
			w.spoil(t, "DELETE FROM ledger_lines WHERE event_id = $1", paid)
			w.spoil(t, "DELETE FROM ledger_entries WHERE event_id = $1", paid)
			return spoilt{b.paid, paid}
		}},
		{"RefundWithoutCreditNote", verify.Lost, func(t *testing.T, w *world, b books) spoilt {
			refunded := w.event(t, b.refunded, event.OrderRefunded)
			w.spoil(t, "DELETE FROM credit_notes WHERE id = $1", refunded)
			return spoilt{b.refunded, refunded}
		}},

		{"SecondEntryForAPayment", verify.Duplicated, func(t *testing.T, w *world, b books) spoilt {
			other := uuid.Must(uuid.NewV7())
			w.spoil(t, `INSERT INTO ledger_entries (tenant_id, event_id, kind, order_id, currency, effective_at)
				SELECT tenant_id, $1, kind, order_id, currency, effective_at FROM ledger_entries WHERE order_id = $2`, other, b.paid)
			w.spoil(t, `INSERT INTO ledger_lines SELECT tenant_id, $1, line_no, debit_account, credit_account, currency, amount_minor
				FROM ledger_lines WHERE event_id = $2`, other, w.event(t, b.paid, event.OrderPaid))
			return spoilt{b.paid, other}
		}},
		{"SecondInvoice", verify.Duplicated, func(t *testing.T, w *world, b books) spoilt {
			other := uuid.Must(uuid.NewV7())
			w.exec(t, "ALTER TABLE invoices DROP CONSTRAINT invoices_order_key")
			w.spoil(t, `INSERT INTO invoices SELECT tenant_id, $1, order_id, year, 999, customer_id, customer_email, currency,
				net_minor, tax_minor, total_minor, taxes, paid_at, issued_at FROM invoices WHERE order_id = $2`, other, b.paid)
			return spoilt{b.paid, other}
		}},
		{"SecondCreditNote", verify.Duplicated, func(t *testing.T, w *world, b books) spoilt {
			other := uuid.Must(uuid.NewV7())
			w.exec(t, "ALTER TABLE credit_notes DROP CONSTRAINT credit_notes_refund_key")
			w.spoil(t, `INSERT INTO credit_notes SELECT tenant_id, $1, invoice_id, order_id, refund_id, 3, year, 999, currency,
				net_minor, tax_minor, total_minor, taxes, reason, refunded_at, issued_at
				FROM credit_notes WHERE refund_id = $2`, other, b.refund)
			return spoilt{b.refunded, other}
		}},
		{"EventAppliedTwice", verify.Duplicated, func(t *testing.T, w *world, b books) spoilt {
			paid := w.event(t, b.paid, event.OrderPaid)
			w.exec(t, "ALTER TABLE processed_events DROP CONSTRAINT processed_events_pkey")
			w.spoil(t, "INSERT INTO processed_events SELECT * FROM processed_events WHERE event_id = $1", paid)
			return spoilt{b.paid, paid}
		}},
		{"TwoEventsForOneChange", verify.Duplicated, func(t *testing.T, w *world, b books) spoilt {
			w.copyEvent(t, b.paid, event.OrderPaid)
			return spoilt{order: b.paid}
		}},

		{"InvoiceWithoutPayment", verify.Phantom, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE invoices SET order_id = $1 WHERE order_id = $2", b.created, b.paid)
			return spoilt{b.created, w.event(t, b.paid, event.OrderPaid)}
		}},
		{"EverythingOfAnOrderThatIsNotThere", verify.Phantom, func(t *testing.T, w *world, b books) spoilt {
			for _, table := range []string{"order_lines", "order_taxes", "payments"} {
				w.spoil(t, "DELETE FROM "+table+" WHERE order_id = $1", b.paid)
			}
			w.spoil(t, "DELETE FROM orders WHERE id = $1", b.paid)
			return spoilt{b.paid, w.event(t, b.paid, event.OrderPaid)}
		}},
		{"EntryOfATenantThatHasNoSuchOrder", verify.Phantom, func(t *testing.T, w *world, b books) spoilt {
			paid := w.event(t, b.paid, event.OrderPaid)
			other := w.newTenant(t, "second")
			w.spoil(t, "UPDATE ledger_lines SET tenant_id = $1 WHERE event_id = $2", other, paid)
			w.spoil(t, "UPDATE ledger_entries SET tenant_id = $1 WHERE event_id = $2", other, paid)
			return spoilt{b.paid, paid}
		}},
		{"CreditNoteWithoutRefund", verify.Phantom, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE credit_notes SET refund_id = $1 WHERE refund_id = $2", uuid.Must(uuid.NewV7()), b.refund)
			return spoilt{b.refunded, w.id(t, "SELECT id FROM credit_notes WHERE order_id = $1 AND ordinal = 1", b.refunded)}
		}},
		{"CreditNoteForAnotherInvoice", verify.Phantom, func(t *testing.T, w *world, b books) spoilt {
			refunded := w.event(t, b.refunded, event.OrderRefunded)
			w.spoil(t, "UPDATE credit_notes SET invoice_id = $1 WHERE id = $2", w.event(t, b.paid, event.OrderPaid), refunded)
			return spoilt{b.refunded, refunded}
		}},
		{"EffectsOfAnotherEvent", verify.Phantom, func(t *testing.T, w *world, b books) spoilt {
			paid, other := w.event(t, b.paid, event.OrderPaid), uuid.Must(uuid.NewV7())
			w.spoil(t, "UPDATE ledger_entries SET event_id = $1 WHERE event_id = $2", other, paid)
			w.spoil(t, "UPDATE ledger_lines SET event_id = $1 WHERE event_id = $2", other, paid)
			return spoilt{b.paid, other}
		}},
		{"EffectsWithoutMark", verify.Phantom, func(t *testing.T, w *world, b books) spoilt {
			paid := w.event(t, b.paid, event.OrderPaid)
			w.spoil(t, "DELETE FROM processed_events WHERE event_id = $1", paid)
			return spoilt{b.paid, paid}
		}},
		{"OrderThatOnlyBillingKnows", verify.Phantom, func(t *testing.T, w *world, _ books) spoilt {
			order := uuid.Must(uuid.NewV7())
			w.spoil(t, `INSERT INTO order_billing (tenant_id, order_id, version, status, currency, total_minor, refunded_minor)
				VALUES ($1, $2, 1, 'created', 'EUR', 1, 0)`, w.tenant, order)
			return spoilt{order: order}
		}},
		{"EventWithoutChange", verify.Phantom, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE outbox_events SET event_type = 'OrderCancelled' WHERE id = $1", w.event(t, b.paid, event.OrderPaid))
			return spoilt{b.paid, w.event(t, b.paid, event.OrderCancelled)}
		}},
		{"LineWithoutEntry", verify.Phantom, func(t *testing.T, w *world, b books) spoilt {
			other := uuid.Must(uuid.NewV7())
			w.spoil(t, `INSERT INTO ledger_lines SELECT tenant_id, $1, line_no, debit_account, credit_account, currency, amount_minor
				FROM ledger_lines WHERE event_id = $2`, other, w.event(t, b.paid, event.OrderPaid))
			return spoilt{event: other}
		}},

		{"EntryWithoutLines", verify.Unbalanced, func(t *testing.T, w *world, b books) spoilt {
			paid := w.event(t, b.paid, event.OrderPaid)
			w.spoil(t, "DELETE FROM ledger_lines WHERE event_id = $1", paid)
			return spoilt{b.paid, paid}
		}},
		{"EntryOverAnotherAmount", verify.Unbalanced, func(t *testing.T, w *world, b books) spoilt {
			paid := w.event(t, b.paid, event.OrderPaid)
			w.spoil(t, "UPDATE ledger_lines SET amount_minor = amount_minor + 1 WHERE event_id = $1 AND line_no = 1", paid)
			return spoilt{b.paid, paid}
		}},
		{"EntryTheWrongWayRound", verify.Unbalanced, func(t *testing.T, w *world, b books) spoilt {
			refunded := w.event(t, b.refunded, event.OrderRefunded)
			w.spoil(t, "UPDATE ledger_lines SET debit_account = credit_account, credit_account = debit_account WHERE event_id = $1", refunded)
			return spoilt{b.refunded, refunded}
		}},
		{"EntryThatReversesAnotherPayment", verify.Unbalanced, func(t *testing.T, w *world, b books) spoilt {
			refunded := w.event(t, b.refunded, event.OrderRefunded)
			w.spoil(t, "UPDATE ledger_entries SET reverses = $1 WHERE event_id = $2", w.event(t, b.paid, event.OrderPaid), refunded)
			return spoilt{b.refunded, refunded}
		}},

		{"OrderThatIsNotItsLines", verify.WrongAmount, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE orders SET tax_minor = tax_minor + 1, total_minor = total_minor + 1 WHERE id = $1", b.created)
			return spoilt{order: b.created}
		}},
		{"OrderLineThatChangedLater", verify.WrongAmount, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE order_lines SET quantity = 3, net_minor = 3 * unit_minor WHERE order_id = $1", b.created)
			return spoilt{order: b.created}
		}},
		{"OrderTaxesByRate", verify.WrongAmount, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE order_taxes SET tax_rate_ppm = 70000 WHERE order_id = $1", b.created)
			return spoilt{order: b.created}
		}},
		{"PaymentOfAnotherAmount", verify.WrongAmount, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE payments SET amount_minor = 1 WHERE order_id = $1", b.paid)
			return spoilt{order: b.paid}
		}},
		{"StatusWithoutPayment", verify.WrongAmount, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE orders SET status = 'paid' WHERE id = $1", b.created)
			return spoilt{order: b.created}
		}},
		{"RefundedSum", verify.WrongAmount, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE orders SET refunded_minor = refunded_minor + 1 WHERE id = $1", b.refunded)
			return spoilt{order: b.refunded}
		}},
		{"RefundSplitAnotherWay", verify.WrongAmount, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE refund_taxes SET net_minor = net_minor + 1, tax_minor = tax_minor - 1 WHERE refund_id = $1 AND tax_rate_ppm = 190000", b.refund)
			return spoilt{order: b.refunded}
		}},
		{"InvoiceOverAnotherAmount", verify.WrongAmount, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE invoices SET net_minor = net_minor + 1, total_minor = total_minor + 1 WHERE order_id = $1", b.paid)
			return spoilt{b.paid, w.event(t, b.paid, event.OrderPaid)}
		}},
		{"InvoiceInAnotherCurrency", verify.WrongAmount, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE invoices SET currency = 'USD' WHERE order_id = $1", b.paid)
			return spoilt{b.paid, w.event(t, b.paid, event.OrderPaid)}
		}},
		{"InvoiceWithOtherTaxes", verify.WrongAmount, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE invoices SET taxes = '[]' WHERE order_id = $1", b.paid)
			return spoilt{b.paid, w.event(t, b.paid, event.OrderPaid)}
		}},
		{"InvoiceWithOtherLines", verify.WrongAmount, func(t *testing.T, w *world, b books) spoilt {
			paid := w.event(t, b.paid, event.OrderPaid)
			w.spoil(t, "DELETE FROM invoice_lines WHERE invoice_id = $1", paid)
			return spoilt{b.paid, paid}
		}},
		{"CreditNoteOverAnotherAmount", verify.WrongAmount, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE credit_notes SET net_minor = net_minor + 1, total_minor = total_minor + 1 WHERE refund_id = $1", b.refund)
			return spoilt{b.refunded, w.id(t, "SELECT id FROM credit_notes WHERE refund_id = $1", b.refund)}
		}},
		{"BillingKnowsAnotherAmount", verify.WrongAmount, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE order_billing SET total_minor = 1 WHERE order_id = $1", b.created)
			return spoilt{order: b.created}
		}},

		{"OrderWithTooManyVersions", verify.VersionGap, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE orders SET version = 7 WHERE id = $1", b.paid)
			return spoilt{order: b.paid}
		}},
		{"EventsWithAGap", verify.VersionGap, func(t *testing.T, w *world, b books) spoilt {
			refunded := w.event(t, b.refunded, event.OrderRefunded)
			w.spoil(t, "UPDATE outbox_events SET aggregate_version = 9 WHERE id = $1", refunded)
			return spoilt{b.refunded, refunded}
		}},
		{"BillingIsAhead", verify.VersionGap, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE order_billing SET version = 2 WHERE order_id = $1", b.created)
			return spoilt{order: b.created}
		}},
		{"CreditNotesWithAGap", verify.VersionGap, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE credit_notes SET ordinal = 3 WHERE ordinal = 2")
			return spoilt{b.refunded, w.event(t, b.refunded, event.OrderRefunded)}
		}},

		{"ChangeWithoutEvent", verify.MissingEvent, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "DELETE FROM outbox_events WHERE aggregate_id = $1 AND event_type = 'OrderPaid'", b.paid)
			return spoilt{order: b.paid}
		}},
		{"InvoiceWithoutEvent", verify.MissingEvent, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "DELETE FROM outbox_events WHERE aggregate_id = $1 AND event_type = 'InvoiceIssued'", b.paid)
			return spoilt{order: b.paid}
		}},

		{"NumbersWithAGap", verify.NumberGap, func(t *testing.T, w *world, _ books) spoilt {
			w.spoil(t, "UPDATE invoices SET number = 3 WHERE number = 2")
			w.spoil(t, "UPDATE document_numbers SET last_number = 3 WHERE kind = 'invoice'")
			return spoilt{}
		}},
		{"LastDocumentGone", verify.NumberGap, func(t *testing.T, w *world, _ books) spoilt {
			w.spoil(t, "DELETE FROM credit_notes WHERE number = 2")
			return spoilt{}
		}},
		{"NumberTakenTwice", verify.NumberGap, func(t *testing.T, w *world, _ books) spoilt {
			w.exec(t, "ALTER TABLE invoices DROP CONSTRAINT invoices_number_key")
			w.spoil(t, "UPDATE invoices SET number = 1")
			w.spoil(t, "UPDATE document_numbers SET last_number = 1 WHERE kind = 'invoice'")
			return spoilt{}
		}},

		{"AccountThatIsNotTheOrders", verify.TrialBalance, func(t *testing.T, w *world, b books) spoilt {
			w.spoil(t, "UPDATE ledger_lines SET credit_account = 'tax-payable' WHERE event_id = $1", w.event(t, b.paid, event.OrderPaid))
			return spoilt{}
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			w := newWorld(t)
			b := rightBooks(t, w)
			want := test.spoil(t, w, b)
			w.runRelay(t)
			report := w.verify(t)
			requireFound(t, report, test.kind, want.order, want.event)
			require.Zero(t, report.InFlight)
		})
	}

	t.Run("NamesSomeOfMany", func(t *testing.T) {
		t.Parallel()

		w := newWorld(t)
		for range verify.MaxNamed + 3 {
			w.placeEUR(t)
		}
		w.deliver(t)
		w.spoil(t, "UPDATE order_billing SET version = 2")
		report := w.verify(t, noWait)
		require.EqualValues(t, verify.MaxNamed+3, report.Violations[verify.VersionGap])
		require.Len(t, report.Findings, verify.MaxNamed)
	})

	t.Run("SaysItToAPerson", func(t *testing.T) {
		t.Parallel()

		w := newWorld(t)
		b := rightBooks(t, w)
		w.spoil(t, "UPDATE ledger_lines SET amount_minor = amount_minor + 1 WHERE event_id = $1 AND line_no = 1", w.event(t, b.paid, event.OrderPaid))
		w.spoil(t, "DELETE FROM credit_notes WHERE order_id = $1 AND ordinal = 2", b.refunded)
		golden(t, "wrong", w.verify(t, noWait))
	})
}

func TestRunTellsLostFromInFlight(t *testing.T) {
	t.Parallel()

	type testBundle struct {
		*world
		order uuid.UUID // paid, and the payment is not applied
	}
	setup := func(t *testing.T) testBundle {
		w := newWorld(t)
		rightBooks(t, w)
		order := w.placeEUR(t)
		w.deliver(t)
		w.pay(t, order)
		return testBundle{w, order}
	}
	requireInFlight := func(t *testing.T, report *verify.Report) {
		t.Helper()
		require.True(t, report.OK, "%v", report.Findings)
		require.EqualValues(t, 1, report.InFlight)
	}

	t.Run("TheRelayHasNotPassedIt", func(t *testing.T) {
		t.Parallel()

		requireInFlight(t, setup(t).verify(t, noWait))
	})

	t.Run("TheConsumerHasNotPassedIt", func(t *testing.T) {
		t.Parallel()

		bundle := setup(t)
		bundle.runRelay(t)
		ctx, stop := context.WithCancelCause(t.Context())
		asked := 0
		config := verify.Config{DB: bundle.reader, Slot: bundle.slot, Wait: time.Hour}
		config.Lag = func(context.Context) (committed, end map[int32]int64, err error) {
			if asked++; asked == 3 {
				stop(errors.New("has asked often enough"))
			}
			return map[int32]int64{0: 7}, map[int32]int64{0: 8 + int64(asked)}, nil
		}
		_, err := verify.Run(ctx, config)
		require.ErrorIs(t, err, context.Canceled)

		config.Wait = time.Millisecond
		report, err := verify.Run(t.Context(), config)
		require.NoError(t, err)
		requireInFlight(t, report)
	})

	t.Run("ItArrivesWhileWaitedFor", func(t *testing.T) {
		t.Parallel()

		bundle := setup(t)
		bundle.runRelay(t)
		delivered := false
		report := bundle.verify(t, func(config *verify.Config) {
			config.Lag = func(context.Context) (committed, end map[int32]int64, err error) {
				end = map[int32]int64{0: 8}
				if !delivered {
					delivered = true
					bundle.deliver(t)
					return map[int32]int64{0: 7}, end, nil
				}
				return end, end, nil
			}
		})
		require.True(t, report.OK, "%v", report.Findings)
		require.Zero(t, report.InFlight)
		require.EqualValues(t, 3, report.Invoices)
		require.True(t, delivered)
	})

	t.Run("WhatCameLaterIsInFlightThoughTheMarkIsPassed", func(t *testing.T) {
		t.Parallel()

		bundle := setup(t)
		bundle.runRelay(t)
		report := bundle.verify(t, func(config *verify.Config) {
			config.Lag = func(ctx context.Context) (committed, end map[int32]int64, err error) {
				bundle.refund(t, bundle.order, 5)
				return upToDate(ctx)
			}
		})
		requireFound(t, report, verify.Lost, bundle.order, bundle.event(t, bundle.order, event.OrderPaid))
		require.EqualValues(t, 1, report.Violations[verify.Lost])
		require.EqualValues(t, 1, report.InFlight)
	})

	t.Run("ADeadLetterIsNeitherButHeld", func(t *testing.T) {
		t.Parallel()

		bundle := setup(t)
		bundle.runRelay(t)
		bundle.spoil(t, `UPDATE outbox_events SET payload = jsonb_set(payload::jsonb, '{total_amount}', '1')::json WHERE id = $1`,
			bundle.event(t, bundle.order, event.OrderPaid))
		bundle.refund(t, bundle.order, 5)
		bundle.deliver(t)
		report := bundle.verify(t)
		require.False(t, report.OK, "a payment without an invoice is no right book")
		require.EqualValues(t, 2, report.Violations[verify.Held])
		require.EqualValues(t, 2, report.Count(), "%v", report.Findings)
		require.Zero(t, report.InFlight)
		require.EqualValues(t, 1, report.DeadLetters.Open)
		require.EqualValues(t, 1, report.DeadLetters.Parked)

		bundle.spoil(t, pgtest.CloseLetters("discarded", "true"))
		report = bundle.verify(t)
		require.EqualValues(t, 2, report.Violations[verify.Lost])
	})

	t.Run("WithoutKafkaOnlyWhatTheDatabaseShows", func(t *testing.T) {
		t.Parallel()

		bundle := setup(t)
		bundle.runRelay(t)
		alone := func(config *verify.Config) { config.Lag, config.Wait = nil, time.Millisecond }
		report := bundle.verify(t, alone)
		requireInFlight(t, report)

		// Its next event is applied: the consumer went by this one.
		paid := bundle.event(t, bundle.order, event.OrderPaid)
		bundle.refund(t, bundle.order, 5)
		bundle.spoil(t, "UPDATE order_billing SET version = 3, status = 'paid', refunded_minor = 5 WHERE order_id = $1", bundle.order)
		requireFound(t, bundle.verify(t, alone), verify.Lost, bundle.order, paid)
	})

	t.Run("ABrokerThatIsAwayIsNoted", func(t *testing.T) {
		t.Parallel()

		bundle := setup(t)
		bundle.runRelay(t)
		report := bundle.verify(t, func(config *verify.Config) {
			config.Lag = func(context.Context) (committed, end map[int32]int64, err error) {
				bundle.deliver(t)
				return nil, nil, errors.New("no broker answers")
			}
		})
		require.True(t, report.OK, "%v", report.Findings)
		require.Zero(t, report.InFlight)
		require.Len(t, report.Notes, 1)
		require.Contains(t, report.Notes[0], "no broker answers")
	})

	t.Run("UnderPollByWhatItHasSeen", func(t *testing.T) {
		t.Parallel()

		bundle := setup(t)
		bundle.exec(t, "SELECT pg_drop_replication_slot($1)", bundle.slot)
		bundle.exec(t, "INSERT INTO relay_assignment (slot_name, relay, target) VALUES ($1, 'poll', 'poll')", bundle.slot)
		bundle.exec(t, `INSERT INTO relay_position (slot_name, system_id, timeline, publication_oid, lsn, snapshot_xmin, snapshot)
			VALUES ($1, '1', 1, 0, '0/0', '3', '3:3:')`, bundle.slot)
		requireInFlight(t, bundle.verify(t, noWait))

		// It leaves one transaction open and has seen all others.
		bundle.exec(t, `UPDATE relay_position SET snapshot = (
			SELECT format('%s:%s:%1$s', tx_id, pg_snapshot_xmax(pg_current_snapshot()))::pg_snapshot
			FROM outbox_events WHERE id = $1)`, bundle.event(t, bundle.order, event.OrderPaid))
		requireInFlight(t, bundle.verify(t, noWait))

		bundle.exec(t, "UPDATE relay_position SET snapshot = pg_current_snapshot()")
		report := bundle.verify(t)
		requireFound(t, report, verify.Lost, bundle.order, bundle.event(t, bundle.order, event.OrderPaid))
		require.Empty(t, report.Notes)
	})

	t.Run("UnderDebeziumByItsSlot", func(t *testing.T) {
		t.Parallel()

		bundle := setup(t)
		bundle.exec(t, "SELECT pg_drop_replication_slot($1)", bundle.slot)
		bundle.exec(t, "INSERT INTO relay_assignment (slot_name, relay, target) VALUES ($1, 'debezium', 'debezium')", bundle.slot)
		report := bundle.verify(t, noWait)
		requireInFlight(t, report)
		require.Len(t, report.Notes, 1)

		bundle.exec(t, "SELECT pg_create_logical_replication_slot(relay_debezium_slot($1), 'pgoutput')", bundle.slot)
		bundle.pay(t, bundle.placeEUR(t))
		report = bundle.verify(t, noWait)
		require.True(t, report.OK, "%v", report.Findings)

		var slot string
		require.NoError(t, bundle.pool.QueryRow(t.Context(), "SELECT relay_debezium_slot($1)", bundle.slot).Scan(&slot))
		bundle.readSlot(t, slot)
		requireFound(t, bundle.verify(t), verify.Lost, bundle.order, bundle.event(t, bundle.order, event.OrderPaid))
	})

	t.Run("ASlotThatIsNotThereIsNoted", func(t *testing.T) {
		t.Parallel()

		bundle := setup(t)
		report := bundle.verify(t, noWait, func(config *verify.Config) { config.Slot = "no_such_slot" })
		requireInFlight(t, report)
		require.Len(t, report.Notes, 1)
		require.Contains(t, report.Notes[0], "no_such_slot")
	})
}

// The result does not depend on how many orders are read at once, whatever is
// right, wrong or in flight among them.
func TestRunPageSize(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	for _, tenant := range []string{"second", "third"} {
		b := rightBooks(t, w)
		w.spoil(t, "UPDATE order_billing SET total_minor = 1 WHERE order_id = $1", b.created)
		w.spoil(t, "UPDATE ledger_lines SET amount_minor = 1 WHERE event_id = $1", w.event(t, b.paid, event.OrderPaid))
		for range 3 {
			rightBooks(t, w)
		}
		w.pay(t, w.placeEUR(t))
		w.spoil(t, `INSERT INTO order_billing (tenant_id, order_id, version, status, currency, total_minor, refunded_minor)
			VALUES ($1, uuidv7(), 1, 'created', 'EUR', 1, 0)`, w.tenant)
		w.tenant = w.newTenant(t, tenant)
	}

	whole := w.verify(t, noWait, func(config *verify.Config) { config.PageSize = 1000 })
	require.EqualValues(t, 2, whole.Violations[verify.Phantom])
	require.EqualValues(t, 2, whole.Violations[verify.Unbalanced])
	require.EqualValues(t, 2, whole.InFlight)
	for _, size := range []int{1, 7} {
		pages := 0
		report := w.verify(t, noWait, func(config *verify.Config) {
			config.PageSize = size
			config.Progress = func(int64) { pages++ }
		})
		require.Equal(t, whole, report)
		require.Equal(t, (36+size)/size, pages)
	}
}

// Goal: nothing is called wrong because it moved while it was looked at.
// Method: orders change and events are applied as fast as they can, and the
// books are verified all the while.
func TestRunUnderLoad(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.runRelay(t)
	config := verify.Config{DB: w.reader, Slot: w.slot, Wait: time.Minute}
	config.Lag = func(context.Context) (committed, end map[int32]int64, err error) {
		rounds := w.rounds.Load() // all that is delivered now is applied two rounds on
		return map[int32]int64{0: rounds}, map[int32]int64{0: rounds + 2}, nil
	}
	reports := make(chan *verify.Report)
	var fault error
	go func() {
		defer close(reports)
		for size := 1; size < 400 && fault == nil; size += 20 {
			var report *verify.Report
			config.PageSize = size
			report, fault = verify.Run(t.Context(), config)
			reports <- report
		}
	}()

	random := rand.New(rand.NewPCG(1, 2))
	var paid []uuid.UUID
	waited := 0
	for open := true; open; {
		order := w.placeEUR(t)
		switch random.IntN(5) {
		case 0:
			w.cancel(t, order)
		case 1, 2, 3:
			w.pay(t, order)
			paid = append(paid, order)
		}
		if len(paid) > 0 && random.IntN(2) == 0 {
			i := random.IntN(len(paid))
			w.refund(t, paid[i], 2975)
			paid = append(paid[:i], paid[i+1:]...)
		}
		if random.IntN(3) == 0 {
			w.deliver(t)
		}
		select {
		case report, more := <-reports:
			if open = more; more && report != nil {
				require.Empty(t, report.Findings)
				waited += int(report.InFlight)
			}
		default:
		}
	}
	require.NoError(t, fault)
	t.Logf("%d changes were in flight", waited)

	w.deliver(t)
	report := w.verify(t)
	require.Empty(t, report.Findings)
	require.Zero(t, report.InFlight)
	require.NotZero(t, report.CreditNotes)
}

func requireFound(t *testing.T, report *verify.Report, kind verify.Kind, order, eventID uuid.UUID) {
	t.Helper()
	require.False(t, report.OK)
	require.NotZero(t, report.Violations[kind], "%v", report.Findings)
	for _, finding := range report.Findings {
		if finding.Kind == kind && finding.OrderID == order && (eventID == uuid.Nil || finding.EventID == eventID) {
			return
		}
	}
	require.Failf(t, "not named", "%s of order %s, event %s, in %v", kind, order, eventID, report.Findings)
}

var anID = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)

// golden compares the text of a report, in which ids are numbered and the year
// is left out.
func golden(t *testing.T, name string, report *verify.Report) {
	t.Helper()
	text := new(strings.Builder)
	require.NoError(t, report.WriteText(text))
	year := time.Now().UTC().Format("numbers of 2006")
	var known []string
	got := anID.ReplaceAllStringFunc(strings.ReplaceAll(text.String(), year, "numbers of YEAR"), func(id string) string {
		for i, other := range known {
			if id == other {
				return "#" + string(rune('1'+i))
			}
		}
		known = append(known, id)
		return "#" + string(rune('0'+len(known)))
	})

	path := "testdata/" + name + ".txt"
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got)
}
