package balances

import (
	"fmt"
	"math/big"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/money"
)

// change is what a batch does to a partition, beside the state until the
// transaction is committed.
type change struct {
	base     *partition
	position position
	accounts map[Account]*sum
	orders   map[orderKey]remembered
	touched  []deadline

	// What records has removed, for commit.
	forgotten []orderKey
	seen      int // of the queue
	swept     int // of the litter

	outcomes map[string]int
	notes    []string
}

func newChange(p *partition) *change {
	return &change{
		base: p, position: p.position, accounts: make(map[Account]*sum),
		orders: make(map[orderKey]remembered), outcomes: make(map[string]int),
	}
}

func (c *change) order(key orderKey) (remembered, bool) {
	if known, changed := c.orders[key]; changed {
		return known, true
	}
	known, isKnown := c.base.orders[key]
	return known, isKnown
}

func (c *change) remember(key orderKey, known remembered) {
	known.Build = c.position.Build
	c.orders[key] = known
	c.touched = append(c.touched, deadline{key, known.At})
}

// post adds the lines of the document's ledger entry.
func (c *change) post(d document, offset int64) {
	touched := make(map[*sum]bool)
	account := func(code string, currency money.Currency) *sum {
		key := Account{d.TenantID, code, currency}
		s := c.accounts[key]
		if s == nil {
			s = &sum{}
			if known := c.base.accounts[key]; known != nil {
				s = known.clone()
			}
			c.accounts[key] = s
		}
		touched[s] = true
		return s
	}
	for _, line := range d.entry.Lines {
		amount := big.NewInt(line.Amount)
		debit, credit := account(line.Debit, d.entry.Currency), account(line.Credit, d.entry.Currency)
		debit.debit.Add(&debit.debit, amount)
		credit.credit.Add(&credit.credit, amount)
	}
	for s := range touched {
		s.entries++
		s.offset = offset
	}
}

// records are what the change writes.
func (c *change) records(window time.Duration) ([]event.Record, error) {
	var records []event.Record
	p := c.base
	add := func(record event.Record, err error) error {
		records = append(records, record)
		return err
	}
	accounts := len(p.accounts)
	fresh := make(map[string]bool)
	for account, s := range c.accounts {
		if p.accounts[account] == nil {
			accounts++
		}
		fresh[string(account.key(p.number))] = true
		if err := add(s.record(account, p.number, c.position.First)); err != nil {
			return nil, err
		}
	}
	for _, key := range p.stale { // all at once, so that no reader sees old and new sums together
		if !fresh[key.key] {
			records = append(records, tombstone(key.topic, p.number, []byte(key.key)))
		}
	}
	for key, known := range c.orders { // after what was removed, so that it is not removed again
		if err := add(toRecord(event.LedgerBalanceOrders, p.number, key.key(), known)); err != nil {
			return nil, err
		}
	}

	oldest := c.position.Clock.Add(-window)
	for c.seen = 0; c.seen < min(len(p.queue), sweepSize) && p.queue[c.seen].at.Before(oldest); c.seen++ {
		entry := p.queue[c.seen]
		known, isKnown := c.order(entry.key)
		if isKnown && !known.At.After(entry.at) {
			c.forgotten = append(c.forgotten, entry.key)
			records = append(records, tombstone(event.LedgerBalanceOrders, p.number, entry.key.key()))
		}
	}
	for c.swept = 0; c.swept < min(len(p.litter), sweepSize); c.swept++ {
		if _, isKnown := c.order(p.litter[c.swept]); !isKnown {
			records = append(records, tombstone(event.LedgerBalanceOrders, p.number, p.litter[c.swept].key()))
		}
	}

	c.position.Accounts = accounts
	if err := add(toRecord(event.LedgerBalanceOrders, p.number, positionKey(p.number), c.position)); err != nil {
		return nil, err
	}
	return records, nil
}

// commit makes the change the partition's state.
func (c *change) commit() {
	p := c.base
	if c.position.Offset == p.Offset {
		return
	}
	p.position = c.position
	for account, s := range c.accounts {
		p.accounts[account] = s
	}
	for key, known := range c.orders {
		p.missing += len(known.Missing) - len(p.orders[key].Missing)
		p.orders[key] = known
	}
	p.queue = append(p.queue[c.seen:], c.touched...)
	for _, key := range c.forgotten {
		p.missing -= len(p.orders[key].Missing)
		delete(p.orders, key)
	}
	p.stale = nil
	p.litter = p.litter[c.swept:]
}

// parseKey reads the key of a record of ledger.balances.
func parseKey(key string) (Account, error) {
	parts := strings.Split(key, "/")
	if len(parts) != 4 {
		return Account{}, fmt.Errorf("key %.100q is not tenant/account/currency/partition", key)
	}
	tenantID, err := uuid.Parse(parts[0])
	if err != nil {
		return Account{}, fmt.Errorf("key %.100q: tenant: %w", key, err)
	}
	return Account{tenantID, parts[1], money.Currency(parts[2])}, nil
}
