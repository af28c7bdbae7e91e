package prove

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math/big"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/event"
)

// books is what is in the tables at one moment, of the tenants of this run.
type books struct {
	orders   map[string]bookOrder
	payments map[string]bookPayment // by order
	refunds  map[string]bookRefund
	outbox   []bookEvent
	applied  []bookApplied
	view     map[string]bookView // billing's, by order

	invoices []bookDocument
	credits  []bookDocument
	numbers  []bookNumbers
	entries  map[string]*bookEntry // by event
	accounts map[account]*big.Int  // debit less credit
	letters  []bookLetter
	at       int64 // when they were read, in microseconds as all times here
}

type bookOrder struct {
	Tenant, Status, Currency  string
	Version                   int64
	Net, Tax, Total, Refunded int64
	Lines, LinesNet           int64
	Customer, Email           string
	Contents, Metadata        digestOf
	Taxes                     []taxPart
	Created, Updated          int64
}

type bookPayment struct {
	Reference, Currency string
	Amount, Paid        int64
}

type bookRefund struct {
	Order            string
	Amount, Net, Tax int64
	Taxes            []taxPart
	Reason           string
	At               int64
}

type bookEvent struct {
	ID, Tenant, AggregateType, Aggregate, Type string
	Version                                    int64
	Payload                                    [sha256.Size]byte
	Said                                       said
	Occurred                                   int64
}

type bookApplied struct {
	Event, Consumer string
	Place           Place
}

type bookView struct {
	Status, Currency         string
	Version, Total, Refunded int64
	Replaced                 bool // it took the place of a state that was not older
}

// bookDocument is an invoice, or a credit note.
type bookDocument struct {
	ID, Order, Refund, Currency, Customer, Email string
	Net, Tax, Total                              int64
	Lines, LinesNet                              int64
	Contents, Taxes                              digestOf
	Invoice, Reason                              string // of a credit note
	Year, Number, Ordinal                        int64
	At, Issued                                   int64 // when it was paid or given back, and when it was written
}

// bookNumbers are the numbers of a tenant's documents of a kind and year.
type bookNumbers struct {
	Tenant, Kind             string
	Year                     int32
	Least, Most, Count, Last int64
}

type bookEntry struct {
	Event, Order, Kind, Currency, Reverses string
	Effective, Recorded                    int64
	Lines                                  []bookLine
}

type bookLine struct {
	Debit, Credit, Currency string
	Amount                  int64
}

// account is a tenant's account in one currency.
type account struct{ Tenant, Code, Currency string }

type bookLetter struct {
	ID, Class, State, Event, Order, Detail string
	Place                                  Place
	Injected                               int // the number that a cell gave the record; 0 for others
	Since                                  time.Time
}

// readBooks reads the tables in one moment.
func readBooks(ctx context.Context, pool *pgxpool.Pool, tenants []string) (*books, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	b := &books{
		orders: make(map[string]bookOrder), payments: make(map[string]bookPayment), refunds: make(map[string]bookRefund),
		view: make(map[string]bookView), entries: make(map[string]*bookEntry), accounts: make(map[account]*big.Int),
	}
	err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		var now time.Time
		if err := tx.QueryRow(ctx, "SELECT now()").Scan(&now); err != nil {
			return err
		}
		b.at = micro(now)
		for _, read := range []func(context.Context, pgx.Tx, []string) error{b.readOrders, b.readEvents, b.readBilling, b.readLedger} {
			if err := read(ctx, tx, tenants); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the books: %w", err)
	}
	return b, nil
}

// each runs a query of the tenants' rows and gives use each row's scanner.
func each(ctx context.Context, tx pgx.Tx, tenants []string, sql string, use func(scan func(...any) error) error) error {
	rows, err := tx.Query(ctx, sql, tenants)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := use(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

func (b *books) readOrders(ctx context.Context, tx pgx.Tx, tenants []string) error {
	err := each(ctx, tx, tenants, `
		SELECT o.id::text, o.tenant_id::text, status, currency, version, net_minor, tax_minor, total_minor, refunded_minor,
		       customer_id, customer_email, coalesce(lines.count, 0), coalesce(lines.net, 0), metadata::text, created_at, updated_at
		FROM orders AS o
		LEFT JOIN (SELECT tenant_id, order_id, count(*), sum(net_minor)::bigint AS net FROM order_lines GROUP BY 1, 2) AS lines
		  ON lines.tenant_id = o.tenant_id AND lines.order_id = o.id
		WHERE o.tenant_id = ANY ($1::uuid[])`, func(scan func(...any) error) error {
		var id string
		var o bookOrder
		var metadata string
		var created, updated time.Time
		err := scan(&id, &o.Tenant, &o.Status, &o.Currency, &o.Version, &o.Net, &o.Tax, &o.Total, &o.Refunded, &o.Customer, &o.Email, &o.Lines, &o.LinesNet,
			&metadata, &created, &updated)
		o.Metadata, o.Created, o.Updated = metadataOf([]byte(metadata)), micro(created), micro(updated)
		b.orders[id] = o
		return err
	})
	if err != nil {
		return err
	}
	contents, err := readLines(ctx, tx, tenants, `
		SELECT order_id::text, sku, description, quantity, unit_minor, net_minor, tax_rate_ppm
		FROM order_lines WHERE tenant_id = ANY ($1::uuid[]) ORDER BY order_id, line_no`)
	if err != nil {
		return err
	}
	taxes, err := readTaxes(ctx, tx, tenants, `
		SELECT order_id::text, tax_rate_ppm, net_minor, tax_minor
		FROM order_taxes WHERE tenant_id = ANY ($1::uuid[]) ORDER BY order_id, tax_rate_ppm`)
	if err != nil {
		return err
	}
	for id, o := range b.orders {
		o.Contents, o.Taxes = contents[id], taxes[id]
		b.orders[id] = o
	}
	err = each(ctx, tx, tenants, `
		SELECT order_id::text, reference, currency, amount_minor, paid_at FROM payments WHERE tenant_id = ANY ($1::uuid[])`, func(scan func(...any) error) error {
		var order string
		var p bookPayment
		var paid time.Time
		err := scan(&order, &p.Reference, &p.Currency, &p.Amount, &paid)
		p.Paid = micro(paid)
		b.payments[order] = p
		return err
	})
	if err != nil {
		return err
	}
	taxes, err = readTaxes(ctx, tx, tenants, `
		SELECT refund_id::text, tax_rate_ppm, net_minor, tax_minor
		FROM refund_taxes WHERE tenant_id = ANY ($1::uuid[]) ORDER BY refund_id, tax_rate_ppm`)
	if err != nil {
		return err
	}
	return each(ctx, tx, tenants, `
		SELECT id::text, order_id::text, amount_minor, net_minor, tax_minor, reason, refunded_at FROM refunds WHERE tenant_id = ANY ($1::uuid[])`, func(scan func(...any) error) error {
		var id string
		var r bookRefund
		var at time.Time
		err := scan(&id, &r.Order, &r.Amount, &r.Net, &r.Tax, &r.Reason, &at)
		r.Taxes, r.At = taxes[id], micro(at)
		b.refunds[id] = r
		return err
	})
}

// readLines makes a digest of the lines of each order, or of each invoice.
func readLines(ctx context.Context, tx pgx.Tx, tenants []string, sql string) (map[string]digestOf, error) {
	contents := make(map[string]digestOf)
	return contents, each(ctx, tx, tenants, sql, func(scan func(...any) error) error {
		var of, sku, description string
		var quantity, unit, net, rate int64
		err := scan(&of, &sku, &description, &quantity, &unit, &net, &rate)
		contents[of] = contents[of].line(sku, description, quantity, unit, net, rate)
		return err
	})
}

func readTaxes(ctx context.Context, tx pgx.Tx, tenants []string, sql string) (map[string][]taxPart, error) {
	taxes := make(map[string][]taxPart)
	return taxes, each(ctx, tx, tenants, sql, func(scan func(...any) error) error {
		var of string
		var part taxPart
		err := scan(&of, &part.Rate, &part.Net, &part.Tax)
		taxes[of] = append(taxes[of], part)
		return err
	})
}

// taxesOf is a digest of a document's taxes, which are JSON.
func taxesOf(text string) (digestOf, error) {
	var taxes []taxAnswer
	err := json.Unmarshal([]byte(text), &taxes)
	return taxesDigest(taxes), err
}

func (b *books) readEvents(ctx context.Context, tx pgx.Tx, tenants []string) error {
	err := each(ctx, tx, tenants, `
		SELECT id::text, tenant_id::text, aggregate_type, aggregate_id::text, event_type, aggregate_version, payload::text, occurred_at
		FROM outbox_events WHERE tenant_id = ANY ($1::uuid[])`, func(scan func(...any) error) error {
		var e bookEvent
		var payload string
		var occurred time.Time
		if err := scan(&e.ID, &e.Tenant, &e.AggregateType, &e.Aggregate, &e.Type, &e.Version, &payload, &occurred); err != nil {
			return err
		}
		e.Payload, e.Occurred = sha256.Sum256([]byte(payload)), micro(occurred)
		// What is not readable says nothing, and is noticed as that.
		e.Said, _ = readSaid(e.Type, payload)
		b.outbox = append(b.outbox, e)
		return nil
	})
	if err != nil {
		return err
	}
	err = each(ctx, tx, tenants, `
		SELECT event_id::text, consumer, topic, partition, "offset"
		FROM processed_events WHERE tenant_id = ANY ($1::uuid[])`, func(scan func(...any) error) error {
		var a bookApplied
		err := scan(&a.Event, &a.Consumer, &a.Place.Topic, &a.Place.Partition, &a.Place.Offset)
		b.applied = append(b.applied, a)
		return err
	})
	if err != nil {
		return err
	}
	// A record that could not be read has no tenant.
	return each(ctx, tx, tenants, `
		SELECT id::text, class, state, coalesce(event_id::text, ''), coalesce(aggregate_id::text, ''), detail, topic, partition, "offset", first_failed_at, record_headers
		FROM dead_letters WHERE tenant_id = ANY ($1::uuid[]) OR tenant_id IS NULL OR tenant_id NOT IN (SELECT id FROM tenants)`, func(scan func(...any) error) error {
		var l bookLetter
		var headers []byte
		err := scan(&l.ID, &l.Class, &l.State, &l.Event, &l.Order, &l.Detail, &l.Place.Topic, &l.Place.Partition, &l.Place.Offset, &l.Since, &headers)
		if err != nil {
			return err
		}
		if l.Injected, err = injectedNumber(headers); err != nil {
			return fmt.Errorf("read the headers of dead letter %s: %w", l.ID, err)
		}
		b.letters = append(b.letters, l)
		return nil
	})
}

// injectedNumber is the number that a cell gave a record, as a dead letter has it.
func injectedNumber(encoded []byte) (int, error) {
	var headers []event.Header
	if err := json.Unmarshal(encoded, &headers); err != nil {
		return 0, err
	}
	for _, header := range headers {
		if header.Key == injectedHeader {
			return strconv.Atoi(string(header.Value))
		}
	}
	return 0, nil
}

func (b *books) readBilling(ctx context.Context, tx pgx.Tx, tenants []string) error {
	err := each(ctx, tx, tenants, `
		SELECT order_id::text, status, currency, version, total_minor, refunded_minor, previous_version >= version
		FROM order_billing WHERE tenant_id = ANY ($1::uuid[])`, func(scan func(...any) error) error {
		var order string
		var v bookView
		err := scan(&order, &v.Status, &v.Currency, &v.Version, &v.Total, &v.Refunded, &v.Replaced)
		b.view[order] = v
		return err
	})
	if err != nil {
		return err
	}
	contents, err := readLines(ctx, tx, tenants, `
		SELECT invoice_id::text, sku, description, quantity, unit_minor, net_minor, tax_rate_ppm
		FROM invoice_lines WHERE tenant_id = ANY ($1::uuid[]) ORDER BY invoice_id, line_no`)
	if err != nil {
		return err
	}
	err = each(ctx, tx, tenants, `
		SELECT i.id::text, i.order_id::text, currency, customer_id, customer_email, i.net_minor, tax_minor, total_minor,
		       coalesce(lines.count, 0), coalesce(lines.net, 0), taxes::text, year, number, paid_at, issued_at
		FROM invoices AS i
		LEFT JOIN (SELECT tenant_id, invoice_id, count(*), sum(net_minor)::bigint AS net FROM invoice_lines GROUP BY 1, 2) AS lines
		  ON lines.tenant_id = i.tenant_id AND lines.invoice_id = i.id
		WHERE i.tenant_id = ANY ($1::uuid[])`, func(scan func(...any) error) error {
		var d bookDocument
		var taxes string
		var paid, issued time.Time
		err := scan(&d.ID, &d.Order, &d.Currency, &d.Customer, &d.Email, &d.Net, &d.Tax, &d.Total, &d.Lines, &d.LinesNet,
			&taxes, &d.Year, &d.Number, &paid, &issued)
		if err == nil {
			d.Taxes, err = taxesOf(taxes)
		}
		d.Contents, d.At, d.Issued = contents[d.ID], micro(paid), micro(issued)
		b.invoices = append(b.invoices, d)
		return err
	})
	if err != nil {
		return err
	}
	err = each(ctx, tx, tenants, `
		SELECT id::text, order_id::text, refund_id::text, currency, net_minor, tax_minor, total_minor,
		       invoice_id::text, reason, taxes::text, year, number, ordinal, refunded_at, issued_at
		FROM credit_notes WHERE tenant_id = ANY ($1::uuid[])`, func(scan func(...any) error) error {
		var d bookDocument
		var taxes string
		var refunded, issued time.Time
		err := scan(&d.ID, &d.Order, &d.Refund, &d.Currency, &d.Net, &d.Tax, &d.Total,
			&d.Invoice, &d.Reason, &taxes, &d.Year, &d.Number, &d.Ordinal, &refunded, &issued)
		if err == nil {
			d.Taxes, err = taxesOf(taxes)
		}
		d.At, d.Issued = micro(refunded), micro(issued)
		b.credits = append(b.credits, d)
		return err
	})
	if err != nil {
		return err
	}
	return each(ctx, tx, tenants, `
		SELECT tenant_id::text, kind, year, min(number), max(number), count(*),
		       coalesce((SELECT last_number FROM document_numbers AS n
		                 WHERE n.tenant_id = used.tenant_id AND n.kind = used.kind AND n.year = used.year), 0)
		FROM (SELECT tenant_id, 'invoice' AS kind, year, number FROM invoices
		      UNION ALL SELECT tenant_id, 'credit-note', year, number FROM credit_notes) AS used
		WHERE tenant_id = ANY ($1::uuid[])
		GROUP BY tenant_id, kind, year`, func(scan func(...any) error) error {
		var n bookNumbers
		err := scan(&n.Tenant, &n.Kind, &n.Year, &n.Least, &n.Most, &n.Count, &n.Last)
		b.numbers = append(b.numbers, n)
		return err
	})
}

func (b *books) readLedger(ctx context.Context, tx pgx.Tx, tenants []string) error {
	err := each(ctx, tx, tenants, `
		SELECT event_id::text, order_id::text, kind, currency, coalesce(reverses::text, ''), effective_at, recorded_at
		FROM ledger_entries WHERE tenant_id = ANY ($1::uuid[])`, func(scan func(...any) error) error {
		var e bookEntry
		var effective, recorded time.Time
		err := scan(&e.Event, &e.Order, &e.Kind, &e.Currency, &e.Reverses, &effective, &recorded)
		e.Effective, e.Recorded = micro(effective), micro(recorded)
		b.entries[e.Event] = &e
		return err
	})
	if err != nil {
		return err
	}
	err = each(ctx, tx, tenants, `
		SELECT event_id::text, debit_account, credit_account, currency, amount_minor
		FROM ledger_lines WHERE tenant_id = ANY ($1::uuid[]) ORDER BY event_id, line_no`, func(scan func(...any) error) error {
		var of string
		var l bookLine
		err := scan(&of, &l.Debit, &l.Credit, &l.Currency, &l.Amount)
		if b.entries[of] == nil {
			b.entries[of] = &bookEntry{Event: of, Kind: "none"} // a line without an entry, which no key should let be
		}
		b.entries[of].Lines = append(b.entries[of].Lines, l)
		return err
	})
	if err != nil {
		return err
	}
	return each(ctx, tx, tenants, `
		SELECT tenant_id::text, code, currency, sum(amount)::text
		FROM (SELECT tenant_id, debit_account AS code, currency, amount_minor::numeric AS amount FROM ledger_lines
		      UNION ALL SELECT tenant_id, credit_account, currency, -amount_minor::numeric FROM ledger_lines) AS sides
		WHERE tenant_id = ANY ($1::uuid[])
		GROUP BY tenant_id, code, currency`, func(scan func(...any) error) error {
		var a account
		var sum string
		if err := scan(&a.Tenant, &a.Code, &a.Currency, &sum); err != nil {
			return err
		}
		b.accounts[a], _ = new(big.Int).SetString(sum, 10) // sums of bigints have no decimals
		return nil
	})
}

// progress is how far the pipeline is, and what it has to come to.
type progress struct {
	orderEvents, billingEvents int64 // in the outbox
	applied, letters           int64
}

func readProgress(ctx context.Context, pool *pgxpool.Pool, tenants []string) (p progress, err error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	err = pool.QueryRow(ctx, `
		SELECT count(*) FILTER (WHERE aggregate_type = 'order'), count(*) FILTER (WHERE aggregate_type = 'billing'),
		       (SELECT count(*) FROM processed_events AS done JOIN outbox_events AS o ON o.id = done.event_id
		         WHERE o.tenant_id = ANY ($1::uuid[]) AND o.aggregate_type = 'order'),
		       (SELECT count(*) FROM dead_letters)
		FROM outbox_events WHERE tenant_id = ANY ($1::uuid[])`, tenants).Scan(&p.orderEvents, &p.billingEvents, &p.applied, &p.letters)
	if err != nil {
		return progress{}, fmt.Errorf("ask how far the pipeline is: %w", err)
	}
	return p, nil
}

// bookTopic is where an event of the outbox belongs.
func (e bookEvent) topic() string { return event.Topic(e.AggregateType) }

func tenantIDs(ctx context.Context, pool *pgxpool.Pool, names []string) ([]string, error) {
	ids := make([]string, len(names))
	for i, name := range names {
		var id uuid.UUID
		if err := pool.QueryRow(ctx, "SELECT id FROM tenants WHERE name = $1", name).Scan(&id); err != nil {
			return nil, fmt.Errorf("look for tenant %s: %w", name, err)
		}
		ids[i] = id.String()
	}
	return ids, nil
}
